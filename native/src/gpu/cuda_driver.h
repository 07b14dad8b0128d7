// The CUDA driver's functions, found at run time.
//
// Invariant: in a driver object every function of the first group is set; those of the second are set when has_green()
// says so, all of them.
#pragma once

#include <memory>
#include <string>

#include "tutti/gpu/cuda_abi.h"
#include "tutti/shared_library.h"

namespace tutti::cuda {

class Driver {
 public:
  // Loads `library`, finds the functions and initialises CUDA. Null, and why, where that isn't possible.
  static std::unique_ptr<Driver> load(const std::string& library, std::string& why);

  [[nodiscard]] bool has_green() const noexcept { return missing_.empty(); }
  // Which functions of green contexts this driver hasn't got, for people.
  [[nodiscard]] const std::string& missing() const noexcept { return missing_; }
  // "12.8" of 12080.
  [[nodiscard]] std::string version() const;
  // "cuCall failed: CUDA_ERROR_NAME (number), text".
  [[nodiscard]] std::string error(const char* call, Result result) const;

  Init* init = nullptr;
  DriverGetVersion* driver_get_version = nullptr;
  DeviceGetCount* device_get_count = nullptr;
  DeviceGet* device_get = nullptr;
  DeviceGetAttribute* device_get_attribute = nullptr;
  GetErrorName* get_error_name = nullptr;
  GetErrorString* get_error_string = nullptr;
  PrimaryContextRetain* primary_context_retain = nullptr;
  PrimaryContextRelease* primary_context_release = nullptr;
  ContextPush* context_push = nullptr;
  ContextPop* context_pop = nullptr;
  StreamPriorityRange* stream_priority_range = nullptr;
  StreamCreateWithPriority* stream_create_with_priority = nullptr;
  StreamSynchronize* stream_synchronize = nullptr;
  StreamDestroy* stream_destroy = nullptr;

  DeviceGetResource* device_get_resource = nullptr;
  SplitSmByCount* split_sm_by_count = nullptr;
  GenerateDescriptor* generate_descriptor = nullptr;
  GreenContextCreate* green_context_create = nullptr;
  GreenContextDestroy* green_context_destroy = nullptr;
  GreenStreamCreate* green_stream_create = nullptr;

 private:
  explicit Driver(const std::string& library) : library_(library) {}
  // Names of the functions that the driver hasn't got, separated by commas.
  std::string find_basic();
  std::string find_green();

  SharedLibrary library_;
  GetProcAddress* get_proc_address_ = nullptr;
  std::string missing_;
};

}  // namespace tutti::cuda
