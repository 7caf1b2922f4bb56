/* A libcuda.so.1 for a machine without an NVIDIA driver.

   cuDNN links against the driver even for work that needs no device: it registers its kernels while
   it decides which engines exist. Here whatever registers a kernel succeeds and hands out the
   address of one dummy object; whatever would touch a device says that there is none. Callers pass
   more arguments than are declared here, which the C calling conventions of Linux allow.

   It must never be loaded into a process that may use a real GPU: see offline.py. */

enum { SUCCESS = 0, NO_DEVICE = 100, DRIVER_VERSION = 13000 };

static long object[1024];

static int hand_out(void **result) {
    if (result) *result = object;
    return SUCCESS;
}

static int zero(int *result) {
    if (result) *result = 0;
    return SUCCESS;
}

#define HANDS_OUT(name) int name(void **result) { return hand_out(result); }
#define READS_ZERO(name) int name(int *result) { return zero(result); }
#define SUCCEEDS(name) int name(void) { return SUCCESS; }
#define NEEDS_DEVICE(name) int name(void) { return NO_DEVICE; }

HANDS_OUT(cuKernelGetFunction)
HANDS_OUT(cuLibraryGetKernel)
HANDS_OUT(cuLibraryLoadData)
HANDS_OUT(cuLibraryLoadFromFile)
HANDS_OUT(cuModuleGetFunction)
HANDS_OUT(cuModuleLoadData)
HANDS_OUT(cuModuleLoadDataEx)
HANDS_OUT(cuModuleLoadFatBinary)

READS_ZERO(cuFuncGetAttribute)
READS_ZERO(cuKernelGetAttribute)

SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuModuleUnload)

NEEDS_DEVICE(cuCtxGetCurrent)
NEEDS_DEVICE(cuCtxGetDevice)
NEEDS_DEVICE(cuCtxGetLimit)
NEEDS_DEVICE(cuCtxPopCurrent)
NEEDS_DEVICE(cuCtxPushCurrent)
NEEDS_DEVICE(cuDeviceGet)
NEEDS_DEVICE(cuDeviceGetAttribute)
NEEDS_DEVICE(cuDeviceGetCount)
NEEDS_DEVICE(cuDevicePrimaryCtxRelease)
NEEDS_DEVICE(cuDevicePrimaryCtxReset)
NEEDS_DEVICE(cuDevicePrimaryCtxRetain)
NEEDS_DEVICE(cuInit)
NEEDS_DEVICE(cuLaunchCooperativeKernel)
NEEDS_DEVICE(cuLaunchKernel)
NEEDS_DEVICE(cuLaunchKernelEx)
NEEDS_DEVICE(cuLinkAddData)
NEEDS_DEVICE(cuLinkAddData_v2)
NEEDS_DEVICE(cuLinkAddFile_v2)
NEEDS_DEVICE(cuLinkComplete)
NEEDS_DEVICE(cuLinkCreate)
NEEDS_DEVICE(cuLinkCreate_v2)
NEEDS_DEVICE(cuLinkDestroy)
NEEDS_DEVICE(cuMemcpyDtoH_v2)
NEEDS_DEVICE(cuModuleGetGlobal_v2)
NEEDS_DEVICE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NEEDS_DEVICE(cuOccupancyMaxPotentialClusterSize)
NEEDS_DEVICE(cuStreamGetCtx)
NEEDS_DEVICE(cuStreamGetGreenCtx)
NEEDS_DEVICE(cuStreamSynchronize)
NEEDS_DEVICE(cuTensorMapEncodeIm2col)
NEEDS_DEVICE(cuTensorMapEncodeTiled)
NEEDS_DEVICE(cuThreadExchangeStreamCaptureMode)

int cuDriverGetVersion(int *version) {
    if (version) *version = DRIVER_VERSION;
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    (void)error;
    if (name) *name = "CUDA_ERROR_NO_DEVICE";
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    if (text) *text = "this machine has no NVIDIA driver";
    return SUCCESS;
}
