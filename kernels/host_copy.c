/* kvtier.kernels.host_copy: rows of bytes from and to many places of the host's memory, in one call that does not hold the GIL.
 *
 * numpy and torch copy such rows too, but through the cache: each line of the destination is read before it is overwritten. libc's long
 * copies are not, they store past the cache, which saves a third of the traffic. This stores short rows past the cache as well.
 *
 * A run is (destination offset, source offset, rows); a row is `pieces` pieces of `bytes` bytes:
 *     destination + run.to + row * destination_row + piece * destination_piece
 *     source + run.from + row * source_row + piece * source_piece
 * All of it is in bytes. The caller answers for the addresses, and that no two pieces share a byte.
 */

#define _GNU_SOURCE   /* RTLD_DEFAULT */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum {
    LINE = 64,
    EXPECTED = 32 * LINE,      /* of a piece, what is fetched ahead */
    SHARE_BYTES = 128 << 10,   /* what a thread takes at once */
    WORTH_WAKING = 4           /* shares: fewer are copied before other threads have woken up */
};

typedef struct {
    int64_t to, from, rows;
} Run;

typedef struct {
    char *destination;
    const char *source;
    const Run *runs;
    int64_t num_runs, runs_per_share;
    long long destination_row, source_row, pieces, destination_piece, source_piece, bytes;
    int past_cache;
    _Atomic int64_t next;   /* the first run that no thread has taken */
} Work;

/* Whole lines; `to` is where one begins. */
static void store_past_cache(char *to, const char *from, int64_t bytes) {
#if defined(__SSE2__)
    for (int64_t done = 0; done < bytes; done += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + done));
        __m128i b = _mm_loadu_si128((const __m128i *)(from + done + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + done + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + done + 48));
        _mm_stream_si128((__m128i *)(to + done), a);
        _mm_stream_si128((__m128i *)(to + done + 16), b);
        _mm_stream_si128((__m128i *)(to + done + 32), c);
        _mm_stream_si128((__m128i *)(to + done + 48), d);
    }
#else
    memcpy(to, from, (size_t)bytes);
#endif
}

/* A part of a line that went past the cache would make memory read the rest of it: what does not begin or end with a line is copied
 * through the cache there, and wholly where it is short. */
static void copy_piece(char *to, const char *from, int64_t bytes, int past_cache) {
    int64_t head = -(uintptr_t)to % LINE, whole = (bytes - head) / LINE * LINE;
    if (!past_cache || whole < (head || bytes % LINE ? 4 * LINE : LINE)) {
        memcpy(to, from, (size_t)bytes);
        return;
    }
    memcpy(to, from, (size_t)head);
    store_past_cache(to + head, from + head, whole);
    memcpy(to + head + whole, from + head + whole, (size_t)(bytes - head - whole));
}

/* The processor foresees what follows what is read, but not where the next piece begins. (Always inline: GNU's compiler takes a function
 * that only does this for one that does nothing.) */
__attribute__((always_inline)) static inline void expect(const char *next, const char *from, int64_t bytes) {
    if (next != from + bytes)
        for (int64_t line = 0; line < bytes && line < EXPECTED; line += LINE)
            __builtin_prefetch(next + line);
}

/* `behind` is what is read after the run. */
static void copy_run(const Work *work, Run run, const char *behind) {
    for (int64_t row = 0; row < run.rows; row++) {
        char *to = work->destination + run.to + row * work->destination_row;
        const char *from = work->source + run.from + row * work->source_row;
        const char *next_row = row + 1 < run.rows ? from + work->source_row : behind;
        for (int64_t piece = 0; piece < work->pieces; piece++, to += work->destination_piece, from += work->source_piece) {
            expect(piece + 1 < work->pieces ? from + work->source_piece : next_row, from, work->bytes);
            copy_piece(to, from, work->bytes, work->past_cache);
        }
    }
}

/* What each thread does: a slow one takes fewer shares. */
static void take_shares(void *shared) {
    Work *work = shared;
    for (;;) {
        int64_t run = atomic_fetch_add(&work->next, work->runs_per_share), end = run + work->runs_per_share;
        if (run >= work->num_runs)
            break;
        for (; run < end && run < work->num_runs; run++) {
            Run next = work->runs[run + 1 < work->num_runs ? run + 1 : run];
            copy_run(work, work->runs[run], work->source + next.from);
        }
    }
#if defined(__SSE2__)
    if (work->past_cache)
        _mm_sfence();   /* nothing else orders such stores, not even a lock */
#endif
}

/* Of a forked child only the thread that forked is left. GNU's library keeps the team of each thread that ever shared work out, and would
 * have this one wait for ever for threads that are gone. Threads that the child starts get teams of their own. */
static _Thread_local int forked;

static void after_fork(void) {
    forked = 1;
}

/* torch's threads, where its OpenMP library has this entry (GNU's and LLVM's have): they are the first to be at hand, since each of
 * torch's operations leaves them waiting for the next for a while. Threads of our own would compete with them for the cores. All of them
 * or none: GNU's library ends the threads that a smaller team leaves over. */
static void share_out(Work *work, unsigned threads) {
    typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
    Parallel parallel = threads > 1 && !forked ? (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel") : NULL;
    if (parallel)
        parallel(take_shares, work, threads, 0);
    else
        take_shares(work);
}

static PyObject *copy_runs(PyObject *Py_UNUSED(module), PyObject *arguments) {
    unsigned long long destination, source;
    long long threads;
    Py_buffer runs;
    Work work = {0};
    if (!PyArg_ParseTuple(arguments, "KKy*LLLLLLLp", &destination, &source, &runs, &work.destination_row, &work.source_row, &work.pieces,
                          &work.destination_piece, &work.source_piece, &work.bytes, &threads, &work.past_cache))
        return NULL;
    if (runs.len % (Py_ssize_t)sizeof(Run) || (uintptr_t)runs.buf % _Alignof(Run) || work.pieces < 1 || work.bytes < 1 || threads < 1) {
        PyBuffer_Release(&runs);
        PyErr_SetString(PyExc_ValueError, "copy_runs: runs are int64 [n, 3]; pieces, bytes and threads are at least 1");
        return NULL;
    }
    work.destination = (char *)(uintptr_t)destination;
    work.source = (const char *)(uintptr_t)source;
    work.runs = runs.buf;
    work.num_runs = runs.len / (Py_ssize_t)sizeof(Run);
    Py_BEGIN_ALLOW_THREADS
    int64_t rows = 0;
    for (int64_t run = 0; run < work.num_runs; run++)
        rows += work.runs[run].rows;
    int64_t shares = 1 + rows * work.pieces * work.bytes / SHARE_BYTES;
    work.runs_per_share = 1 + work.num_runs / shares;
    share_out(&work, shares < WORTH_WAKING ? 1 : (unsigned)threads);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&runs);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_runs", copy_runs, METH_VARARGS,
     "copy_runs(destination, source, runs, destination_row, source_row, pieces, destination_piece, source_piece, bytes, threads, "
     "past_cache)\n--\n\nCopy runs of rows, int64 [n, 3] of (destination offset, source offset, rows); all else is in the stub."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "host_copy", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_host_copy(void) {
    if (pthread_atfork(NULL, NULL, after_fork))
        return PyErr_NoMemory();
    return PyModuleDef_Init(&definition);
}
