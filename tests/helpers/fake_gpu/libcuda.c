/* A CUDA driver without a device: it loads nothing and hands every launch to a hook, or drops it. */
#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>

typedef void (*launch_hook)(unsigned grid, unsigned block, unsigned shared, void *stream, void *function, void **params);
static launch_hook hook;
static int multiprocessors = 132;

void fake_on_launch(launch_hook called) { hook = called; }

static CUresult answer(int *out, int value) {
  *out = value;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "error of the driver without a device";
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) { return answer(version, 13000); }
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return answer(device, ordinal); }
CUresult cuCtxGetDevice(CUdevice *device) { return answer(device, 0); }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    return answer(value, multiprocessors);
  return answer(value, attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 227 * 1024);
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = malloc(1); /* a handle of its own for every function */
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  return answer(value, attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0);
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; i++)
    *(CUdeviceptr *)values[i] = pointer;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  if (config->gridDimY != 1 || config->gridDimZ != 1 || config->blockDimY != 1 || config->blockDimZ != 1)
    return CUDA_ERROR_INVALID_VALUE;
  if (hook)
    hook(config->gridDimX, config->blockDimX, config->sharedMemBytes, config->hStream, function, params);
  return CUDA_SUCCESS;
}
