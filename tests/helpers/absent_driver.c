/* A CUDA driver that does nothing: each function that Triton asks for succeeds, and a launch leaves what it
 * was handed. See absent_driver.py.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
static int one(void **context) { *context = (void *)1; return 0; }
int cuCtxGetCurrent(void **context) { return one(context); }
int cuDevicePrimaryCtxRetain(void **context, int device) { return (void)device, one(context); }
int cuModuleLoadData(void **module, const void *image) { return (void)image, one(module); }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    return (void)module, (void)name, one(function);
}
int cuLibraryLoadData(void **library) { return one(library); }
int cuLibraryGetKernel(void **kernel) { return one(kernel); }
int cuKernelGetFunction(void **function) { return one(function); }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGet(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value) { *value = 232448; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuFuncGetAttribute(int *value, int name) { *value = name ? 0 : 1024; return 0; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "an error"; return 0; }
int cuPointerGetAttribute(uint64_t *value, int name, uint64_t pointer) { (void)name; *value = pointer; return 0; }
#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxGetLimit) NOTHING(cuCtxSetLimit)
NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuModuleUnload) NOTHING(cuLibraryUnload)
NOTHING(cuOccupancyMaxActiveClusters) NOTHING(cuTensorMapEncodeTiled) NOTHING(cuTensorMapEncodeIm2col)
/* What the last launch was handed: function, grid, block, shared bytes, stream, parameters. */
uint64_t handed[64];
int n_parameters, widths[32], n_launches, refused;
static int keep(void *function, const unsigned *sizes, unsigned shared, void *stream, void **parameters) {
    if (refused) return refused;
    n_launches++;
    memset(handed, 0, sizeof handed);
    handed[0] = (uint64_t)function;
    for (int i = 0; i < 6; i++) handed[1 + i] = sizes[i];
    handed[7] = shared, handed[8] = (uint64_t)stream;
    for (int i = 0; i < n_parameters; i++) memcpy(handed + 9 + i, parameters[i], (size_t)widths[i]);
    return 0;
}
int cuLaunchKernel(void *function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f,
                   unsigned shared, void *stream, void **parameters, void **options) {
    unsigned sizes[] = {a, b, c, d, e, f};
    return options ? 1 : keep(function, sizes, shared, stream, parameters);
}
typedef struct { unsigned sizes[6], shared; void *stream, *attributes; unsigned n_attributes; } Configuration;
int cuLaunchKernelEx(const Configuration *own, void *function, void **parameters, void **options) {
    return own->n_attributes || options ? 1 : keep(function, own->sizes, own->shared, own->stream, parameters);
}
