"""What the demo's users say: a long system prompt that all share, and sixteen people with four turns each.

Written for this demo. A repair workshop is a fair picture of the work a prefix cache is for: one set of house rules
before every conversation, people who come back several times, and a history that grows with each visit.

Texts are kept as they read best: wrapped lines, a blank line between paragraphs (system prompt) or turns (users).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


def _paragraphs(text: str) -> tuple[str, ...]:
    return tuple(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


@dataclass(frozen=True)
class DemoUser:
    """One visitor and what they say, turn by turn."""

    name: str
    turns: tuple[str, ...]


SYSTEM_PROMPT: Final = "\n\n".join(_paragraphs("""
You are the desk assistant of the Ferry Lane Repair House, a workshop run by volunteers in an old boat shed by the
river. People write to you about things that no longer work, and you help them to find out what is wrong, whether it
can be mended, and what to bring along. The following house rules come before anything a visitor asks for.

How a repair works. A visitor brings the object, tells its story, and sits beside the volunteer while it is taken
apart. We do not take things in and call you when they are done: whoever owns the thing should learn what was inside
it. A first visit takes about an hour. If a spare part is needed, we write down its exact type and where it can be
bought, and the visitor comes back with it. There is no charge for the work. Parts that we have in our drawers, such
as screws, fuses, belts, switches and common capacitors, cost what we paid for them. Many people put something into
the tin by the door, but nobody has to.

What we do not do. We do not open microwave ovens, because the capacitor can kill even when the plug is out. We do not
work on gas appliances, on car brakes, on climbing gear, or on anything that holds up a person at a height. We do not
refill or open refrigerant circuits. We do not defeat locks unless the visitor can show that the lock is theirs.
Batteries that are swollen, dented or warm are not brought inside; there is a sand bucket outside the door, and the
volunteer on duty must be called before anything else happens.

How to answer. Ask at most two questions at a time, and only when the answer changes what you would advise. Begin with
the most likely cause and with the test that costs least: a fuse, a worn brush, a dry joint, a perished belt. Say
clearly when something may only be touched with the plug pulled out, and say how long to wait before it is safe. If an
object is worth more as a memory than as a machine, say so kindly and suggest what can be kept. Never promise that a
repair will succeed; about seven in ten do. Give measurements in millimetres, and temperatures in degrees Celsius.
When a visitor should come by, name the bench, the evening, and the three things they should bring: the object, its
lead or key or charger, and any part that has already fallen off. Keep your answers short, in plain words, and
friendly; many of our visitors are old, and some of them are repairing something for the first time in their lives.
"""))

USERS: Final[tuple[DemoUser, ...]] = (
    DemoUser("Marta", _paragraphs("""
Good evening. I have my grandmother's standing lamp, brass, with a heavy foot and two bulbs on little arms. It came to
me when her flat was cleared, and for three years it stood in my hall without any trouble. Since last week one of the
two bulbs flickers when somebody walks past, and yesterday it went dark altogether while the other one stayed bright.
I have already put in a new bulb, and I swapped the two bulbs with each other, and it is always the left arm that
stays dark. The lead is covered in cloth and looks a little worn where it goes into the foot. The switch is a chain
that one pulls, and it works both arms at once. I have a screwdriver and I am careful, but I have never opened a lamp.
Is this something I could look at myself at the kitchen table, or should I leave it alone and bring it to you?

Thank you, that helps. I pulled the plug and turned the left socket a little, and there is a small brown mark beside
the spring in the middle. The spring also looks flatter than the one on the right. Does that mean that the socket is
finished, or can one bend the spring up again?

I did bend it with a wooden stick and now the left bulb burns again, but the foot hums quietly when it is on. I am
worried about the cloth lead. Can one still buy such a lead, and how do I know which thickness I need?

Then I would like to come by. My daughter could drive me on Thursday or on Saturday. Which day is better, which bench
should I ask for, and what should I put into the bag besides the lamp?
""")),
    DemoUser("Joseph", _paragraphs("""
Hello, my problem is an old valve radio, the kind with a green eye that closes when the station comes in. I found it
in the attic of the house we bought in spring. The cabinet is walnut and in good condition, somebody must have kept it
under a blanket. I know enough to be afraid of the voltages inside, so I have not switched it on yet. From the back I
can see seven valves, a large transformer, and a few grey and yellow tubes with wax running out of them onto the metal
below. One of the two cords that move the needle is broken and hangs down. On a paper label it says 1954 and a type
number, of which I can only read the first three digits. I would love to hear it play once, for my father's eightieth
birthday, which is in five weeks. What should I do first, and what should I under no circumstances do?

I will leave the plug out, I promise. I have counted the wax tubes now: eleven small ones and two big ones that are as
thick as my thumb. Do all of them have to be replaced, or only those that have leaked?

That sounds possible in five weeks. About the needle: the broken cord is about as thin as fishing line and runs over
three little wheels. Is there a plan for how it was laid, or does one have to work it out?

One more thing before I come. The loudspeaker cloth has a tear as long as a finger. My wife can sew well. Should she
mend it first, or wait until the electronics are done?
""")),
    DemoUser("Aisha", _paragraphs("""
Hi! I ride a steel bicycle from the eighties to work every day, eleven kilometres there and eleven back, in all
weathers. For a few weeks there has been a clicking noise from somewhere around the pedals. It comes once per turn of
the cranks, but only when I push hard, for example on the bridge or when I start at a traffic light. If I pedal
lightly there is no sound at all. I have cleaned and oiled the chain, I have tightened the bolts of the saddle and the
handlebar, and I have put a drop of oil where the pedals are screwed in. It is still there, and to my ear it is
getting louder. A colleague says that it is the bottom bracket and that I must buy a new one at once, another says
that I should just ignore it. I would like to know how to find out which part is making the noise before I spend
money.

I tried what you said with the pedals. Standing up or sitting makes no difference, but with my left foot alone it
clicks, and with my right foot alone it stays quiet. What does that tell us?

The left pedal does have some play, maybe one millimetre if I wiggle it. I could not get it off the crank, though. The
spanner slipped and I did not want to ruin anything. Which way does it turn?

It came off, you were right about the direction! The thread of the crank looks fine but it is dry and full of dirt.
What do I clean it with, and shall I bring the bike on Saturday so that somebody looks at the bearing?
""")),
    DemoUser("Henrik", _paragraphs("""
Dear volunteers, I have inherited six dining chairs made of beech with bent backs, the sort that used to stand in
every coffee house. Two of them wobble, and in one of the two the bent back has begun to come apart: there is a crack
along the curve, about two hundred millimetres long, into which I can push the edge of a coin. The seats are of woven
cane, and in three chairs there are holes where the cane has broken at the front edge. My late brother tried to fix
one of them with white glue and a belt, and the old glue sits in the joints like hard plastic. I have time, as I am
retired, and I have a shed with a bench, but no experience with furniture. I do not need them to be perfect, but my
whole family will come for midsummer and I would like all six to carry a person safely. Where would you start?

I have knocked one leg loose as you described, with a block of wood in between. Most of the white glue came off with
warm water and vinegar, but inside the hole there is still a hard ring of it. Can I drill it out?

Now the crack in the back. If I press it together with my hands it closes completely, and it opens again when I let
go. Would hide glue hold there, or do I need the steam box that you mentioned?

Good. I would bring the two worst chairs and leave the others at home. How long must the glue stay in the clamps, and
can the cane be rewoven in the same visit, or is that a matter for the sewing circle?
""")),
    DemoUser("Noor", _paragraphs("""
Hello, this is about a stand mixer that is older than I am. My mother bought it in 1979 and baked every cake of my
childhood with it, and I have used it every week since she died. On Sunday, in the middle of a heavy bread dough, it
became slower and slower, there was a smell like a hot tram, and then it stopped. I pulled the plug at once. When I
tried it again after an hour it ran, but only on the highest of its three speeds, and there were blue sparks to be
seen through the slots at the back. With the dough hook out, the shaft turns freely by hand. I have not opened it
because I cannot see any screws, only four rubber feet and a metal badge. The maker went out of business long ago, so
I do not know where I would find parts. Please tell me that this is not the end of it.

The feet came off, and there really were screws under them. I can see two small blocks of something black that press
on a copper ring. One of them is as long as my fingernail and the other is almost gone. Are these the brushes?

Both springs still push. I measured the longer brush with a ruler: it is six millimetres wide, eight high and about
eleven long. The copper ring has a black band around it. Should I clean it, and with what?

I cleaned the ring as you said, and it is shiny again. Before I order brushes: what about the two lower speeds? Are
they also a matter of the brushes, or is there something else that I should have checked on Tuesday?
""")),
    DemoUser("Tomas", _paragraphs("""
Good day. I look after the clock in the reading room of our town library, although nobody ever appointed me. It is a
wall clock with a pendulum, wound with a key once a week, with an eight-cornered case and a strike on the hour. For
many years it lost a minute a week, which I corrected on Mondays. Since the heating was renewed in autumn it stops
every two or three days, mostly during the night. If I give the pendulum a push it goes on as if nothing had happened,
until the next time. I have checked with a level that the case hangs straight, and I have made sure that the hands do
not touch each other or the glass. I hear that the tick is not quite even any more: a longer one and then a shorter
one. Nobody has oiled it within living memory. I would not like to harm it. What can a layman sensibly try?

I moved the foot of the case to the left by the width of a pencil, and the tick became even. It has now been running
for four days, but today it stopped again, right before the strike. Does the time of day mean anything?

You are right, there is a small wheel with a pin that lifts a lever shortly before the hour, and it looks dry and
brown there. What kind of oil may one use, and how much of it? I only own sewing machine oil.

The library agrees that I may bring the movement without the case. How do I take it down safely when the spring is
still half wound, and who at your place knows about strikes?
""")),
    DemoUser("Grace", _paragraphs("""
Hello there, I have a question about shoes. I own one good pair of leather walking boots, which I bought twelve years
ago and which have carried me across four countries. The leather has always been greased and is in very good shape.
Now the sole of the right boot is coming away at the toe, so that it opens like a mouth when I walk, and I can put
three fingers inside. The left one still holds, but if I bend it I can see a thin gap beginning at the same place. The
soles themselves have enough profile for another two years. The shoemaker in town looked at them for five seconds and
told me to buy new ones. I am sixty-eight, and my feet have spent twelve years teaching these boots their shape. In
September I want to walk for ten days along the coast with my sister. Can something like this be glued or sewn so that
it really lasts, or am I being sentimental?

There is a row of stitches all around the edge, and at the toe the thread has worn through for about sixty
millimetres. Under it I see an old yellow layer that crumbles when I scratch it. What is that layer?

All right, so the crumbling layer has to come out. Is that something that I can do at home with a brush, or would I
damage the leather? And should the left boot be opened as well, although it still holds?

I think I understand. Then I will come to the bench with the strong sewing machine. How many visits should I count on
before September, and how long do the boots have to rest after the last one before I may walk in them?
""")),
    DemoUser("Kenji", _paragraphs("""
Hi, I play keyboard in a small band, and my old synthesizer has a problem that drives me mad. It is from 1986, it has
sixty-one keys, and I have had it since I was at school. About ten of the keys do not sound any more, or they sound
only when I hit them hard, and then far too loud. They are not next to each other: it is nearly every sixth key, which
seems like a strange pattern to me. Apart from that everything works, the sounds are still in memory, the display
lights up, and the outputs are clean. I have opened it once to blow out the dust, and I saw long green boards under
the keys with strips of grey rubber on top. I can solder, not beautifully, but it holds. We have a concert in three
weeks. What could the pattern mean, and is this more likely to be dirt or a broken part?

I took out the first rubber strip, and there are little black pads inside it, two for each key. The boards have
matching black spots under them. Everything is dusty, and under the bad keys I see a dull film. Do I clean both sides?

After cleaning, seven of the ten keys are back. The other three are exactly every sixth key counted from the lowest C.
Could it be one of the wires in the flat cable, and how would I test that without a drawing?

I measured it as you said: one diode shows the same value in both directions. Do you have such a diode in the drawers,
and may I come on Tuesday and solder it in at the electronics bench myself?
""")),
    DemoUser("Elena", _paragraphs("""
Good morning! I am writing for my neighbour, who is ninety-one and does not use a computer. She has a treadle sewing
machine, black with gold flowers, in its own table with an iron frame. It has been in her family for a hundred years,
and she sewed her wedding dress on it. She would love to make a quilt for her first great-grandchild, but the machine
makes loops on the lower side of the cloth, and after a few centimetres the thread gets caught and tears. The leather
belt was slack, so I have already shortened it, and the treadle runs very nicely now. I threaded the machine by a
picture that I found, and I put in a new needle from the supermarket. The little boat that carries the lower thread
moves back and forth, and I wiped some black grease from its track. She is sure that the machine is all right and that
I am the one who is doing something wrong, and she may well be right. What should we look at first?

The needle from the supermarket has one flat side, and the old one, which she has now found in a drawer, is round and
a little longer. So perhaps it was the needle after all. Can one still buy the round kind?

With the old needle it sews! But every tenth stitch or so is left out. She says that one has to set the needle bar by
two lines. I do see two scratches on it. Which of the two belongs where?

It now makes two metres without a mistake, and she cried a little. To keep it running: where does it need oil, how
often, and could somebody have a look at the belt if we bring only the belt and not the whole machine?
""")),
    DemoUser("Samuel", _paragraphs("""
Hello. I restore old garden tools as a hobby and sell some of them at the market, for the benefit of the school. Last
month I was given a hand-cranked drill, the kind that one leans on with the chest, with two speeds and a wooden
handle. It was completely rusted. I put it into a bath of vinegar for two days, brushed it, rinsed it and oiled it,
and it looks very good now. However, the large gear wheel grinds against the small one, and every turn there is a
place where it becomes so heavy that I have to use both hands. The chuck opens and closes, but one of its three jaws
comes out later than the other two, so that a drill bit sits at an angle. I do not know if I have put the jaws back in
the wrong order, since I took them out for cleaning. I would like to understand it and not only get it to work. Where
would you begin with such a thing?

There are indeed small numbers on the jaws, one, two and three, which I had taken for scratches. I put them in as you
said and the chuck is now true. The heavy place in the gear is still there, though. How do I find the tooth?

I marked the teeth with chalk, and it is always the same one on the large wheel. It has a small burr on one flank,
perhaps from a fall. May I take it off with a file, and how do I avoid taking too much?

It runs smoothly now, thank you. The wooden handle has a split along the grain, and it is loose on its rod. Would you
glue it, or turn a new one on your lathe, and which wood would be right for that?
""")),
    DemoUser("Yusuf", _paragraphs("""
Good evening, I hope that you can help with a vacuum cleaner. It is only six years old and it was not cheap. For some
days it has been switching itself off after about five minutes. If I wait for half an hour it starts again and runs
for another five minutes. The suction seems weaker to me than it used to be, and the air that comes out at the back is
warm and smells of dust. I have put in a new bag, and I have pushed a broomstick through the hose to see if something
was stuck, but it was free. The brush on the floor head turns. My children are three and five, so the thing sees a
good deal of rice, sand and small pieces of plastic. A new one would cost three hundred, which I do not want to spend
if there is only some small part at fault. I have never opened such a machine. What should I check, and in which
order?

There really is a filter behind a flap at the back, and I did not know of it in six years. It was grey and stiff like
felt. The book says that it can be washed. How long does it have to dry before I may put it in again?

With the clean filter it ran for twenty minutes today and then switched itself off again. The floor head feels hot
where the brush goes in. There are long hairs and thread wound around both of its ends. Could that be the reason?

I cut all of it away, and the brush turns much more easily. It has now cleaned the whole flat without stopping. Is it
still worth coming by, for example so that somebody checks the motor, or shall I leave it at that?
""")),
    DemoUser("Ingrid", _paragraphs("""
Dear Repair House, I am a teacher at the primary school behind the church, and I have a globe in need of help. It is a
large one, about four hundred millimetres across, with a lamp inside that makes the mountains and the sea currents
visible when it is lit. It has stood in the classroom since before I was born, and several countries on it no longer
exist, which is exactly why I like it. A football hit it last week. It fell from its stand, and now there is a dent
near Madagascar, the axis is bent, and the lamp no longer lights up. The globe itself seems to consist of two halves
of cardboard or plastic which meet at the equator, and there the paper has torn open for the length of a hand. The
class has collected forty-three in coins for the repair, and they ask me every morning how the patient is doing. Can
it be saved, and could some of the children perhaps be there when it happens?

They are delighted. I looked at the lamp: it sits on a rod that comes up from the south pole, and the bulb is loose in
its socket and black inside. The lead has a switch on it and no earth. Is it safe to try with a new bulb?

We have not switched it on, as you advised. About the dent: if I press carefully from the inside, the surface springs
back with a pop and then slowly sinks in again. Is there a way to make it stay?

Then we shall come with four children on a Saturday, before the class on sharpening begins. Which benches will we
need, how long will it take, and what could the children do with their own hands so that it becomes their repair?
""")),
    DemoUser("Olga", _paragraphs("""
Hello, I am the cook of a small kindergarten, and it is about our big kettle. It is an electric one of ten litres,
made of steel, with a tap at the bottom, and we make tea for sixty children in it every morning. Since Monday it takes
more than an hour until the water boils, when before it took about twenty-five minutes. It hums as it always did, and
the red lamp comes on. The lid closes well, and the tap does not drip. Our water is very hard here. I descale the
kettle at the end of every month with citric acid, but I have to admit that I left it out twice in spring, when I was
ill. On the floor of the kettle there is a white crust, and in the middle of it a dark ring which I cannot scrub away.
The caretaker says that it draws less current than it should, he has a device for that. What does this mean, and may
we still use it until it is mended?

The caretaker has measured again: it takes a little under one kilowatt, and on the badge it says three. He believes
that there are three heaters in it and that two have died. Is he right, and can one replace a single heater?

We let the citric acid stand overnight, and a piece of crust as big as a plate came off. Under it the dark ring is
rough and has a crack. No water comes out underneath. Should we stop using it now?

Good, then we shall boil water in pots for the time being. The kettle is heavy. Can somebody look at it on a Thursday,
and which of its papers do you need so that the right heater is ordered at once?
""")),
    DemoUser("Pavel", _paragraphs("""
Good day to you. I have a wooden toboggan that my grandfather built in the winter of 1961, out of ash, with iron bands
on its runners. My own children have used it every winter, and now the time has come for their children. In January
one of the two runners broke, just where it bends upwards at the front. The break is long and splintered, and no piece
is missing. The iron band is still whole and holds the two parts more or less together. A neighbour offered to screw a
steel plate over it, but I fear that it will then break behind the plate. I do have the right wood: an ash tree that
fell in our garden two years ago and has been lying under a roof ever since. What I do not have is a way to bend it.
Would you try to glue the old runner, or make a new one, and how does one get such a bend into a piece of ash as thick
as two fingers?

I have split a piece off the trunk, and it has straight grain without knots, twelve hundred millimetres long. My
moisture meter shows eighteen percent. Is it too wet or too dry for the steam box?

Then I will plane it to twenty-five millimetres, as you say. For the form I would saw the curve out of old beams. The
old runner springs back a little when I take off the band. How much more must I bend the new one?

The form is finished. How long does the wood have to stay in the steam, how many hands do we need when it comes out,
and on which day could I have the box for a whole morning?
""")),
    DemoUser("Lucia", _paragraphs("""
Hi there! I have a small tape recorder, the kind with cassettes, which belonged to my uncle. He recorded all his
children on it, birthdays, first words, quarrels about homework, and there are thirty-one cassettes. I would like to
copy them to a computer before my cousin's wedding. The recorder does switch on, and I can hear the hiss in the
headphones, but the wheels do not turn. When I press the key for playing, there is a quiet whirring somewhere inside,
and after a moment the key jumps up again with a clack. Fast forward does the same. I looked in through the window
with a torch, and I see a piece of something black and sticky, like tar, hanging from a little wheel. I have not put
any of his cassettes into it, because I am afraid that it would eat them. What is the black stuff, and how should I go
on?

So it was a belt once! I opened the back with four screws, and there is black tar on three wheels and on my fingers.
What takes it off, and what must it not get on?

It is clean now. I laid a thread around the wheels as you described, and it is one hundred and ninety millimetres
long. What size of belt should I ask for, given that a new one has to be under tension?

The new belt is in and an old cassette of mine plays, although a little too slowly, and the voices sound sleepy. Is
there a screw for that, and is it safe to play my uncle's cassettes now, or should somebody check the heads first?
""")),
    DemoUser("Walter", _paragraphs("""
Dear people of the boat shed, I remember when there were still boats in it. I am writing because of a pair of garden
shears, a thing of no value, which I bought with my first wages in 1958. They are the large sort with two long
handles, for hedges. The blades have been ground so often that they have become narrow, and for two years they have
not cut properly: they pinch the twigs and tear them, and the leaves turn brown. I tightened the bolt in the middle,
and now they are hard to open, but they still do not cut. I drew a file along both blades on the side that looks dull.
A friend told me that this was wrong, and that one must only ever file the slanted side. One of the wooden handles is
also cracked, and I have wound tape around it. My wife gave me an electric hedge trimmer, which I do not like. Do you
think that these shears can be made to cut once more, or have I filed them to death?

I held them up to the light as you said. When they are closed, the blades touch at the tip and near the bolt, and in
the middle there is a gap that I can see daylight through. Is that as it should be?

So it is right that they are hollow. Then there is only the flat side, on which I filed a small bevel, perhaps half a
millimetre. How can that be taken away again without a machine?

I would rather have it done by somebody with steady hands. Is the class on the third Saturday the right place for it,
and could a new handle be turned from the ash of an old rake?
""")),
)

MAX_USERS: Final = len(USERS)
MAX_TURNS: Final = min(len(user.turns) for user in USERS)
