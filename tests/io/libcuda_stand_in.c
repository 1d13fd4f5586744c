/* A stand-in for the CUDA driver library, for the real KvikIO on a machine without a GPU.
 *
 * KvikIO looks up the driver's functions before it moves a byte, also between a file and host memory. Here they exist: every
 * pointer is host memory, copies are memcpy, streams and events do nothing, and what would need a device says "not supported".
 * It is no GPU, and nothing that runs on it shows anything about GPUDirect.
 *
 *     gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 libcuda_stand_in.c
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_SUPPORTED = 801 };
enum { ATTRIBUTE_MEMORY_TYPE = 2, PAGE = 4096 };

static int the_context, the_stream;

#define ANSWER(name, ...) int name(__VA_ARGS__)
#define NOTHING(name) ANSWER(name, void) { return SUCCESS; }
#define WITHOUT_DEVICE(name) ANSWER(name, void) { return NOT_SUPPORTED; }

/* the library */
NOTHING(cuInit)
ANSWER(cuDriverGetVersion, int *version) { *version = 13000; return SUCCESS; }
ANSWER(cuGetErrorName, int code, const char **text) { (void)code; *text = "STAND_IN"; return SUCCESS; }
ANSWER(cuGetErrorString, int code, const char **text) { (void)code; *text = "no device behind this driver"; return SUCCESS; }
ANSWER(cuGetProcAddress_v2, const char *name, void **function) { (void)name; *function = NULL; return NOT_FOUND; }

/* devices: none to be found, and number 0 for whoever asks without looking */
ANSWER(cuDeviceGetCount, int *count) { *count = 0; return SUCCESS; }
ANSWER(cuDeviceGet, int *device, int number) { *device = number; return SUCCESS; }
ANSWER(cuDeviceGetAttribute, int *value) { *value = 0; return SUCCESS; }

/* contexts: one, which is never current by itself */
ANSWER(cuDevicePrimaryCtxRetain, void **context) { *context = &the_context; return SUCCESS; }
NOTHING(cuDevicePrimaryCtxRelease_v2)
ANSWER(cuCtxGetCurrent, void **context) { *context = NULL; return SUCCESS; }
ANSWER(cuCtxGetDevice, int *device) { *device = 0; return SUCCESS; }
NOTHING(cuCtxPushCurrent_v2)
ANSWER(cuCtxPopCurrent_v2, void **context) { if (context) *context = &the_context; return SUCCESS; }
NOTHING(cuCtxSynchronize)
NOTHING(cuCtxDestroy_v2)
WITHOUT_DEVICE(cuCtxCreate_v2)
WITHOUT_DEVICE(cuCtxCreate_v4)

/* memory: no pointer is the device's */
ANSWER(cuPointerGetAttribute, void *value) { (void)value; return INVALID_VALUE; }
ANSWER(cuPointerGetAttributes, unsigned count, int *attributes, void **values)
{
    for (unsigned i = 0; i < count; i++) {
        if (attributes[i] == ATTRIBUTE_MEMORY_TYPE) *(int *)values[i] = 0;
        else *(void **)values[i] = NULL;
    }
    return SUCCESS;
}
WITHOUT_DEVICE(cuMemGetAddressRange_v2)
ANSWER(cuMemHostAlloc, void **memory, size_t size) { return posix_memalign(memory, PAGE, size) ? OUT_OF_MEMORY : SUCCESS; }
ANSWER(cuMemAllocHost_v2, void **memory, size_t size) { return cuMemHostAlloc(memory, size); }
ANSWER(cuMemFreeHost, void *memory) { free(memory); return SUCCESS; }
NOTHING(cuMemHostRegister_v2)
NOTHING(cuMemHostUnregister)
ANSWER(cuMemcpy, void *to, const void *from, size_t size) { memcpy(to, from, size); return SUCCESS; }
ANSWER(cuMemcpyAsync, void *to, const void *from, size_t size) { return cuMemcpy(to, from, size); }
ANSWER(cuMemcpyHtoD_v2, void *to, const void *from, size_t size) { return cuMemcpy(to, from, size); }
ANSWER(cuMemcpyDtoH_v2, void *to, const void *from, size_t size) { return cuMemcpy(to, from, size); }
ANSWER(cuMemcpyHtoDAsync_v2, void *to, const void *from, size_t size) { return cuMemcpy(to, from, size); }
ANSWER(cuMemcpyDtoHAsync_v2, void *to, const void *from, size_t size) { return cuMemcpy(to, from, size); }
WITHOUT_DEVICE(cuMemcpyBatchAsync)
WITHOUT_DEVICE(cuMemcpyBatchAsync_v2)

/* streams and events: everything is over when the call returns */
ANSWER(cuStreamCreate, void **stream) { *stream = &the_stream; return SUCCESS; }
NOTHING(cuStreamDestroy_v2)
NOTHING(cuStreamSynchronize)
WITHOUT_DEVICE(cuLaunchHostFunc)
ANSWER(cuEventCreate, void **event) { *event = &the_stream; return SUCCESS; }
NOTHING(cuEventDestroy_v2)
NOTHING(cuEventRecord)
NOTHING(cuEventSynchronize)
NOTHING(cuEventQuery)
