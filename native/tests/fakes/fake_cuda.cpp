// A libcuda that records: it makes no GPU work, keeps count of what exists, refuses what the real one refuses, and
// fails where a test says so. Built as a shared library of its own; a test gives its path to what is tested and reaches
// the same instance by dlopen to command it (fake_cuda.h).
#include "fake_cuda.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "tutti/gpu/cuda_abi.h"

using namespace tutti::cuda;

namespace {

constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kNotFound = 500, kDestroyed = 709;

struct Fake {
  unsigned sms = 132, least = 8, alignment = 8;
  int devices = 1, version = 13000, major = 9;
  std::string log;
  std::map<std::string, std::pair<int, int>> failures;  // name -> (calls until it fails, result)
  std::set<std::string> absent;
  uintptr_t next = 0x1000;
  std::map<uintptr_t, uintptr_t> streams;  // stream -> green context, 0 = the primary one
  std::map<uintptr_t, unsigned> contexts;  // green context -> SMs
  std::map<uintptr_t, unsigned> descriptors;
  int retained = 0, pushed = 0;
  std::mutex mutex;
};
std::unique_ptr<Fake>& holder() {
  static std::unique_ptr<Fake> state = std::make_unique<Fake>();
  return state;
}
Fake& state() { return *holder(); }

// Notes a call; what it must return instead of working, else success.
Result enter(const std::string& name, const std::string& arguments = {}) {
  state().log += name + "(" + arguments + ")\n";
  const auto found = state().failures.find(name);
  if (found == state().failures.end() || --found->second.first > 0) {
    return kSuccess;
  }
  const Result result = found->second.second;
  state().failures.erase(found);
  return result;
}

template <typename Handle>
uintptr_t number(Handle handle) {
  return reinterpret_cast<uintptr_t>(handle);
}

#define ENTER(...)                                       \
  const std::lock_guard<std::mutex> lock(state().mutex); \
  if (const Result fails = enter(__VA_ARGS__); fails != kSuccess) return fails

Result init(unsigned flags) {
  ENTER("cuInit", std::to_string(flags));
  return state().devices == 0 ? kNoDevice : kSuccess;
}
Result driver_get_version(int* version) {
  *version = state().version;
  return kSuccess;
}
Result device_get_count(int* count) {
  ENTER("cuDeviceGetCount");
  *count = state().devices;
  return kSuccess;
}
Result device_get(Device* device, int ordinal) {
  ENTER("cuDeviceGet", std::to_string(ordinal));
  *device = ordinal + 40;  // not the ordinal: who mixes them up fails
  return kSuccess;
}
Result device_get_attribute(int* value, int attribute, Device device) {
  ENTER("cuDeviceGetAttribute", std::to_string(attribute) + "," + std::to_string(device));
  *value = attribute == kMultiprocessorCount ? static_cast<int>(state().sms) : state().major;
  return attribute == kMultiprocessorCount || attribute == kComputeCapabilityMajor ? kSuccess : kInvalidValue;
}
Result get_error_name(Result error, const char** name) {
  *name = error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : error == kNoDevice ? "CUDA_ERROR_NO_DEVICE" : nullptr;
  return *name != nullptr ? kSuccess : kInvalidValue;
}
Result get_error_string(Result error, const char** text) {
  *text = error == kOutOfMemory ? "out of memory" : nullptr;
  return *text != nullptr ? kSuccess : kInvalidValue;
}
Result retain(Context* context, Device device) {
  ENTER("cuDevicePrimaryCtxRetain", std::to_string(device));
  ++state().retained;
  *context = reinterpret_cast<Context>(0x77);
  return kSuccess;
}
Result release(Device device) {
  ENTER("cuDevicePrimaryCtxRelease", std::to_string(device));
  return --state().retained < 0 ? kInvalidContext : kSuccess;
}
Result push(Context context) {
  ENTER("cuCtxPushCurrent", std::to_string(number(context)));
  ++state().pushed;
  return kSuccess;
}
Result pop(Context* context) {
  ENTER("cuCtxPopCurrent");
  *context = reinterpret_cast<Context>(0x77);
  return --state().pushed < 0 ? kInvalidContext : kSuccess;
}
Result priority_range(int* least, int* greatest) {
  ENTER("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return state().pushed > 0 ? kSuccess : kInvalidContext;
}
Result stream_create(Stream* stream, unsigned flags, int priority) {
  ENTER("cuStreamCreateWithPriority", std::to_string(flags) + "," + std::to_string(priority));
  if (state().pushed == 0) {
    return kInvalidContext;
  }
  const uintptr_t made = state().next++;
  state().streams[made] = 0;
  *stream = reinterpret_cast<Stream>(made);
  return kSuccess;
}
Result stream_synchronize(Stream stream) {
  ENTER("cuStreamSynchronize", std::to_string(number(stream)));
  return state().streams.contains(number(stream)) ? kSuccess : kInvalidValue;
}
Result stream_destroy(Stream stream) {
  ENTER("cuStreamDestroy", std::to_string(number(stream)));
  const auto found = state().streams.find(number(stream));
  if (found == state().streams.end()) {
    return kInvalidValue;
  }
  if (found->second != 0 && !state().contexts.contains(found->second)) {
    return kDestroyed;
  }
  state().streams.erase(found);
  return kSuccess;
}
Result get_resource(Device device, Resource* resource, int type) {
  ENTER("cuDeviceGetDevResource", std::to_string(device) + "," + std::to_string(type));
  *resource = Resource{};
  resource->type = type;
  resource->sm = {state().sms, state().least, state().alignment};
  std::memset(resource->internal, 0x5A, sizeof resource->internal);
  return kSuccess;
}
Result split(Resource* groups, unsigned* count, const Resource* input, Resource* remaining, unsigned flags,
             unsigned least) {
  ENTER("cuDevSmResourceSplitByCount", std::to_string(*count) + "," + std::to_string(input->sm.count) + "," +
                                           std::to_string(flags) + "," + std::to_string(least));
  if (input->type != kResourceSm || input->internal[0] != 0x5A) {
    return kInvalidValue;  // not what the driver gave
  }
  const unsigned step = state().alignment != 0 ? state().alignment : 8;
  const unsigned given = (least + step - 1) / step * step;
  groups[0] = *input;
  groups[0].sm.count = given;
  *remaining = *input;
  remaining->sm.count = input->sm.count - given;
  *count = 1;
  return kSuccess;
}
Result generate(ResourceDescriptor* descriptor, Resource* resources, unsigned count) {
  ENTER("cuDevResourceGenerateDesc", std::to_string(resources->sm.count) + "," + std::to_string(count));
  const uintptr_t made = state().next++;
  state().descriptors[made] = resources->sm.count;
  *descriptor = reinterpret_cast<ResourceDescriptor>(made);
  return kSuccess;
}
Result green_create(GreenContext* context, ResourceDescriptor descriptor, Device device, unsigned flags) {
  ENTER("cuGreenCtxCreate", std::to_string(state().descriptors[number(descriptor)]) + "," + std::to_string(device) +
                                "," + std::to_string(flags));
  if (flags != kGreenDefaultStream || state().pushed == 0) {
    return kInvalidValue;
  }
  const uintptr_t made = state().next++;
  state().contexts[made] = state().descriptors[number(descriptor)];
  *context = reinterpret_cast<GreenContext>(made);
  return kSuccess;
}
Result green_destroy(GreenContext context) {
  ENTER("cuGreenCtxDestroy", std::to_string(state().contexts[number(context)]));
  return state().contexts.erase(number(context)) == 1 ? kSuccess : kDestroyed;
}
Result green_stream(Stream* stream, GreenContext context, unsigned flags, int priority) {
  ENTER("cuGreenCtxStreamCreate", std::to_string(state().contexts[number(context)]) + "," + std::to_string(flags) +
                                      "," + std::to_string(priority));
  if (flags != kStreamNonBlocking) {
    return kInvalidValue;
  }
  const uintptr_t made = state().next++;
  state().streams[made] = number(context);
  *stream = reinterpret_cast<Stream>(made);
  return kSuccess;
}

struct Entry {
  int since;
  void* function;
};
template <typename Function>
Entry entry(int since, Function* function) {
  return {since, reinterpret_cast<void*>(function)};
}
const std::map<std::string, Entry>& entries() {
  static const std::map<std::string, Entry> all{
      {"cuInit", entry(2000, &init)},
      {"cuDriverGetVersion", entry(2020, &driver_get_version)},
      {"cuDeviceGetCount", entry(2000, &device_get_count)},
      {"cuDeviceGet", entry(2000, &device_get)},
      {"cuDeviceGetAttribute", entry(2000, &device_get_attribute)},
      {"cuGetErrorName", entry(6000, &get_error_name)},
      {"cuGetErrorString", entry(6000, &get_error_string)},
      {"cuDevicePrimaryCtxRetain", entry(7000, &retain)},
      {"cuDevicePrimaryCtxRelease", entry(11000, &release)},
      {"cuCtxPushCurrent", entry(4000, &push)},
      {"cuCtxPopCurrent", entry(4000, &pop)},
      {"cuCtxGetStreamPriorityRange", entry(5050, &priority_range)},
      {"cuStreamCreateWithPriority", entry(5050, &stream_create)},
      {"cuStreamSynchronize", entry(2000, &stream_synchronize)},
      {"cuStreamDestroy", entry(4000, &stream_destroy)},
      {"cuDeviceGetDevResource", entry(12040, &get_resource)},
      {"cuDevSmResourceSplitByCount", entry(12040, &split)},
      {"cuDevResourceGenerateDesc", entry(12040, &generate)},
      {"cuGreenCtxCreate", entry(12040, &green_create)},
      {"cuGreenCtxDestroy", entry(12040, &green_destroy)},
      {"cuGreenCtxStreamCreate", entry(12050, &green_stream)},
  };
  return all;
}

}  // namespace

extern "C" {

Result cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* found) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  const auto at = entries().find(symbol);
  *function = nullptr;
  if (flags != kProcAddressDefault || at == entries().end() || state().absent.contains(symbol) ||
      at->second.since != version || at->second.since > state().version) {
    return kNotFound;
  }
  *function = at->second.function;
  if (found != nullptr) {
    *found = 0;
  }
  return kSuccess;
}

void fake_cuda_reset() { holder() = std::make_unique<Fake>(); }
void fake_cuda_device(int devices, unsigned sms, unsigned least, unsigned alignment, int major, int version) {
  state().devices = devices;
  state().sms = sms;
  state().least = least;
  state().alignment = alignment;
  state().major = major;
  state().version = version;
}
void fake_cuda_fail(const char* function, int call, int result) { state().failures[function] = {call, result}; }
void fake_cuda_without(const char* function) { state().absent.insert(function); }
const char* fake_cuda_log() { return state().log.c_str(); }
int fake_cuda_alive() {
  return static_cast<int>(state().streams.size() + state().contexts.size()) + state().retained + state().pushed;
}

}  // extern "C"
