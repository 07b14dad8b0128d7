#include "cuda_driver.h"

#include <cstdlib>

#if __has_include(<cuda.h>)
#include <cuda.h>
#if CUDA_VERSION >= 12050
namespace tutti::cuda {
static_assert(sizeof(Resource) == sizeof(CUdevResource) && offsetof(Resource, sm) == offsetof(CUdevResource, sm));
static_assert(offsetof(SmResource, count) == offsetof(CUdevSmResource, smCount));
#if CUDA_VERSION >= 13000
static_assert(offsetof(SmResource, least) == offsetof(CUdevSmResource, minSmPartitionSize));
static_assert(offsetof(SmResource, alignment) == offsetof(CUdevSmResource, smCoscheduledAlignment));
#endif
static_assert(sizeof(Result) == sizeof(CUresult) && sizeof(Device) == sizeof(CUdevice));
static_assert(sizeof(Stream) == sizeof(CUstream) && sizeof(GreenContext) == sizeof(CUgreenCtx));
static_assert(sizeof(ResourceDescriptor) == sizeof(CUdevResourceDesc) && sizeof(Context) == sizeof(CUcontext));
static_assert(kSuccess == CUDA_SUCCESS && kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(kMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kResourceSm == CU_DEV_RESOURCE_TYPE_SM && kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kGreenDefaultStream == CU_GREEN_CTX_DEFAULT_STREAM && kProcAddressDefault == CU_GET_PROC_ADDRESS_DEFAULT);
}  // namespace tutti::cuda
#endif
#endif

namespace tutti::cuda {
namespace {

// Asks the driver for one function after another and collects the names of those that it hasn't got.
class Finder {
 public:
  explicit Finder(GetProcAddress* get) : get_(get) {}

  template <typename Function>
  void operator()(const char* symbol, int version, Function*& function) {
    void* at = nullptr;
    if (get_(symbol, &at, version, kProcAddressDefault, nullptr) != kSuccess || at == nullptr) {
      missing += (missing.empty() ? "" : ", ") + std::string(symbol);
      return;
    }
    function = reinterpret_cast<Function*>(at);
  }

  std::string missing;

 private:
  GetProcAddress* get_;
};

}  // namespace

std::unique_ptr<Driver> Driver::load(const std::string& library, std::string& why) {
  std::unique_ptr<Driver> driver(new Driver(library));
  if (!driver->library_.loaded()) {
    why = "no NVIDIA driver: " + driver->library_.error();
    return nullptr;
  }
  if (!driver->library_.find("cuGetProcAddress_v2", driver->get_proc_address_)) {
    why = "the NVIDIA driver is older than CUDA 12.0: it has no cuGetProcAddress_v2";
    return nullptr;
  }
  if (const std::string missing = driver->find_basic(); !missing.empty()) {
    why = "the NVIDIA driver hasn't got " + missing;
    return nullptr;
  }
  if (const Result result = driver->init(0); result != kSuccess) {
    why = (result == kNoDevice ? "no NVIDIA GPU: " : "") + driver->error("cuInit", result);
    return nullptr;
  }
  driver->missing_ = driver->find_green();
  return driver;
}

std::string Driver::find_basic() {
  Finder find(get_proc_address_);
  find("cuInit", 2000, init);
  find("cuDriverGetVersion", 2020, driver_get_version);
  find("cuDeviceGetCount", 2000, device_get_count);
  find("cuDeviceGet", 2000, device_get);
  find("cuDeviceGetAttribute", 2000, device_get_attribute);
  find("cuGetErrorName", 6000, get_error_name);
  find("cuGetErrorString", 6000, get_error_string);
  find("cuDevicePrimaryCtxRetain", 7000, primary_context_retain);
  find("cuDevicePrimaryCtxRelease", 11000, primary_context_release);
  find("cuCtxPushCurrent", 4000, context_push);
  find("cuCtxPopCurrent", 4000, context_pop);
  find("cuCtxGetStreamPriorityRange", 5050, stream_priority_range);
  find("cuStreamCreateWithPriority", 5050, stream_create_with_priority);
  find("cuStreamSynchronize", 2000, stream_synchronize);
  find("cuStreamDestroy", 4000, stream_destroy);
  return find.missing;
}

std::string Driver::find_green() {
  Finder find(get_proc_address_);
  find("cuDeviceGetDevResource", 12040, device_get_resource);
  find("cuDevSmResourceSplitByCount", 12040, split_sm_by_count);
  find("cuDevResourceGenerateDesc", 12040, generate_descriptor);
  find("cuGreenCtxCreate", 12040, green_context_create);
  find("cuGreenCtxDestroy", 12040, green_context_destroy);
  find("cuGreenCtxStreamCreate", 12050, green_stream_create);
  return find.missing;
}

std::string Driver::version() const {
  int number = 0;
  if (driver_get_version(&number) != kSuccess) {
    return "unknown";
  }
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

std::string Driver::error(const char* call, Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  std::string message = std::string(call) + " failed: ";
  message += get_error_name(result, &name) == kSuccess && name != nullptr ? name : "unknown CUDA error";
  message += " (" + std::to_string(result) + ")";
  if (get_error_string(result, &text) == kSuccess && text != nullptr) {
    message += std::string(", ") + text;
  }
  return message;
}

}  // namespace tutti::cuda
