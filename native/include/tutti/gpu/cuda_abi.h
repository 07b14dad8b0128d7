// The few declarations of the CUDA driver interface that this project uses, under names of our own, so that it compiles
// where no CUDA toolkit is installed. Where one is, native/src/gpu/cuda_driver.cpp compares sizes, offsets and values.
//
// Source: CUDA Driver API, sections Green Contexts, Stream Management, Primary Context Management, Driver Entry Point
// Access. The number in a comment is the CUDA version whose form of the function this is: cuGetProcAddress is asked for
// that one, whatever the driver's own version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tutti::cuda {

using Result = int;  // CUresult
using Device = int;  // CUdevice
using Context = struct ContextOpaque*;
using Stream = struct StreamOpaque*;
using GreenContext = struct GreenContextOpaque*;
using ResourceDescriptor = struct ResourceDescriptorOpaque*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kNoDevice = 100;

inline constexpr int kMultiprocessorCount = 16;     // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
inline constexpr int kComputeCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
inline constexpr int kResourceSm = 1;               // CU_DEV_RESOURCE_TYPE_SM
inline constexpr unsigned kStreamNonBlocking = 1;   // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kGreenDefaultStream = 1;  // CU_GREEN_CTX_DEFAULT_STREAM: required
inline constexpr uint64_t kProcAddressDefault = 0;  // CU_GET_PROC_ADDRESS_DEFAULT

// CUdevSmResource. Drivers before 13.0 write the first word only.
struct SmResource {
  unsigned count;
  unsigned least;      // minSmPartitionSize
  unsigned alignment;  // smCoscheduledAlignment
};

// CUdevResource, 144 bytes in every version so far; what isn't named here must be zero or as the driver left it.
struct alignas(8) Resource {
  int type;
  unsigned char internal[92];
  union {
    SmResource sm;
    unsigned char bytes[48];
  };
};
static_assert(sizeof(Resource) == 144 && offsetof(Resource, sm) == 96);

using GetProcAddress = Result(const char* symbol, void** function, int version, uint64_t flags, int* found);  // 12.0
using Init = Result(unsigned flags);                                                                          // 2.0
using DriverGetVersion = Result(int* version);                                                                // 2.2
using DeviceGetCount = Result(int* count);                                                                    // 2.0
using DeviceGet = Result(Device* device, int ordinal);                                                        // 2.0
using DeviceGetAttribute = Result(int* value, int attribute, Device device);                                  // 2.0
using GetErrorName = Result(Result error, const char** name);                                                 // 6.0
using GetErrorString = Result(Result error, const char** text);                                               // 6.0
using PrimaryContextRetain = Result(Context* context, Device device);                                         // 7.0
using PrimaryContextRelease = Result(Device device);                                                          // 11.0
using ContextPush = Result(Context context);                                                                  // 4.0
using ContextPop = Result(Context* context);                                                                  // 4.0
using StreamPriorityRange = Result(int* least, int* greatest);                                                // 5.5
using StreamCreateWithPriority = Result(Stream* stream, unsigned flags, int priority);                        // 5.5
using StreamSynchronize = Result(Stream stream);                                                              // 2.0
using StreamDestroy = Result(Stream stream);                                                                  // 4.0
using DeviceGetResource = Result(Device device, Resource* resource, int type);                                // 12.4
using SplitSmByCount = Result(Resource* groups, unsigned* count, const Resource* input, Resource* remaining,
                              unsigned flags, unsigned least);                                           // 12.4
using GenerateDescriptor = Result(ResourceDescriptor* descriptor, Resource* resources, unsigned count);  // 12.4
using GreenContextCreate = Result(GreenContext* context, ResourceDescriptor descriptor, Device device,
                                  unsigned flags);                                                     // 12.4
using GreenContextDestroy = Result(GreenContext context);                                              // 12.4
using GreenStreamCreate = Result(Stream* stream, GreenContext context, unsigned flags, int priority);  // 12.5

}  // namespace tutti::cuda
