#include "tutti/gpu/partition.h"

#include <algorithm>
#include <stdexcept>

#include "cuda_driver.h"

namespace tutti {
namespace {

// Keeps the first of several things that went wrong: it is the cause.
void keep_first(std::string& first, std::string next) {
  if (first.empty()) {
    first = std::move(next);
  }
}

// CUDA C++ Programming Guide, green contexts: least part and step by compute capability.
cuda::SmResource by_architecture(int major) {
  if (major >= 9) {
    return {0, 8, 8};
  }
  if (major == 8) {
    return {0, 4, 2};
  }
  return major == 7 ? cuda::SmResource{0, 2, 2} : cuda::SmResource{0, 1, 1};
}

// Makes a context current for a scope. A failure to push shows in the calls that follow.
class CurrentContext {
 public:
  CurrentContext(const cuda::Driver& driver, cuda::Context context)
      : driver_(driver), pushed_(driver.context_push(context) == cuda::kSuccess) {}
  ~CurrentContext() {
    cuda::Context popped = nullptr;
    if (pushed_) {
      driver_.context_pop(&popped);
    }
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const cuda::Driver& driver_;
  bool pushed_;
};

}  // namespace

SmPartition::SmPartition(const PartitionOptions& options) {
  driver_ = cuda::Driver::load(options.library, reason_);
  if (driver_ == nullptr) {
    return;
  }
  reason_ = open_device(options.device);
  if (!reason_.empty()) {
    return;
  }
  cuda::Context primary = nullptr;
  if (const auto result = driver_->primary_context_retain(&primary, device_); result != cuda::kSuccess) {
    reason_ = driver_->error("cuDevicePrimaryCtxRetain", result);
    return;
  }
  retained_ = true;
  try {
    const CurrentContext current(*driver_, primary);
    if (const auto result = driver_->stream_priority_range(&least_priority_, &greatest_priority_);
        result != cuda::kSuccess) {
      reason_ = driver_->error("cuCtxGetStreamPriorityRange", result);
    } else {
      reason_ = make_green(options.io_sms);
      if (reason_.empty()) {
        kind_ = PartitionKind::Green;
        return;
      }
      const std::string why = make_priority_stream();
      if (why.empty()) {
        kind_ = PartitionKind::Priority;
        return;
      }
      reason_ += "; and " + why;
    }
  } catch (...) {
    drop_device();
    throw;
  }
  drop_device();
}

SmPartition::~SmPartition() { close(); }

std::string SmPartition::open_device(int ordinal) {
  int count = 0;
  if (const auto result = driver_->device_get_count(&count); result != cuda::kSuccess) {
    return driver_->error("cuDeviceGetCount", result);
  }
  if (count == 0) {
    return "no NVIDIA GPU";
  }
  if (ordinal < 0 || ordinal >= count) {
    throw std::invalid_argument("device " + std::to_string(ordinal) + " isn't there: this process sees " +
                                std::to_string(count) + " NVIDIA GPU(s), numbered from 0");
  }
  if (const auto result = driver_->device_get(&device_, ordinal); result != cuda::kSuccess) {
    return driver_->error("cuDeviceGet", result);
  }
  int sms = 0;
  if (driver_->device_get_attribute(&sms, cuda::kMultiprocessorCount, device_) == cuda::kSuccess) {
    device_sms_ = static_cast<uint32_t>(std::max(sms, 0));
  }
  return {};
}

cuda::SmResource SmPartition::granularity(const cuda::Resource& all) const {
  if (all.sm.least != 0 && all.sm.alignment != 0) {
    return all.sm;
  }
  int major = 9;  // the coarsest, where even that isn't known
  driver_->device_get_attribute(&major, cuda::kComputeCapabilityMajor, device_);
  cuda::SmResource found = by_architecture(major);
  found.count = all.sm.count;
  return found;
}

std::string SmPartition::make_green(uint32_t io_sms) {
  if (!driver_->has_green()) {
    return "the NVIDIA driver (CUDA " + driver_->version() +
           ") has no green contexts, which need CUDA 12.5: " + driver_->missing() + " not found";
  }
  cuda::Resource all{};
  if (const auto result = driver_->device_get_resource(device_, &all, cuda::kResourceSm); result != cuda::kSuccess) {
    return driver_->error("cuDeviceGetDevResource", result);
  }
  device_sms_ = all.sm.count;
  const cuda::SmResource sm = granularity(all);
  if (sm.count < 2 * sm.least) {
    return "the device is too small: of its " + std::to_string(sm.count) + " SMs two parts would need " +
           std::to_string(sm.least) + " each";
  }
  const uint32_t most = (sm.count - sm.least) / sm.alignment * sm.alignment;
  if (io_sms < sm.least || io_sms > most || io_sms % sm.alignment != 0) {
    throw std::invalid_argument("io_sms " + std::to_string(io_sms) + " isn't possible: of this device's " +
                                std::to_string(sm.count) + " SMs the I/O domain can have " + std::to_string(sm.least) +
                                " to " + std::to_string(most) + " in steps of " + std::to_string(sm.alignment) +
                                ", and the compute domain gets the rest");
  }
  cuda::Resource io{}, rest{};
  unsigned groups = 1;
  if (const auto result = driver_->split_sm_by_count(&io, &groups, &all, &rest, 0, io_sms); result != cuda::kSuccess) {
    return driver_->error("cuDevSmResourceSplitByCount", result);
  }
  if (groups != 1 || io.sm.count != io_sms || rest.type != cuda::kResourceSm || rest.sm.count == 0) {
    return "the driver split " + std::to_string(sm.count) + " SMs into " + std::to_string(io.sm.count) + " and " +
           std::to_string(rest.sm.count) + " where " + std::to_string(io_sms) + " were asked for";
  }
  std::string why = make_domain(io, greatest_priority_, io_);
  if (why.empty()) {
    why = make_domain(rest, 0, compute_);
  }
  if (!why.empty()) {
    drop(compute_);
    drop(io_);
  }
  return why;
}

std::string SmPartition::make_domain(cuda::Resource& resource, int priority, Domain& domain) {
  cuda::ResourceDescriptor descriptor = nullptr;  // the driver owns it; there is no call that frees it
  if (const auto result = driver_->generate_descriptor(&descriptor, &resource, 1); result != cuda::kSuccess) {
    return driver_->error("cuDevResourceGenerateDesc", result);
  }
  if (const auto result =
          driver_->green_context_create(&domain.context, descriptor, device_, cuda::kGreenDefaultStream);
      result != cuda::kSuccess) {
    domain.context = nullptr;
    return driver_->error("cuGreenCtxCreate", result);
  }
  if (const auto result =
          driver_->green_stream_create(&domain.stream, domain.context, cuda::kStreamNonBlocking, priority);
      result != cuda::kSuccess) {
    domain.stream = nullptr;
    return driver_->error("cuGreenCtxStreamCreate", result);
  }
  domain.sms = resource.sm.count;
  return {};
}

std::string SmPartition::make_priority_stream() {
  if (const auto result =
          driver_->stream_create_with_priority(&io_.stream, cuda::kStreamNonBlocking, greatest_priority_);
      result != cuda::kSuccess) {
    io_.stream = nullptr;
    return driver_->error("cuStreamCreateWithPriority", result);
  }
  return {};
}

std::string SmPartition::drop(Domain& domain) {
  std::string first;
  if (domain.stream != nullptr) {
    if (const auto result = driver_->stream_synchronize(domain.stream); result != cuda::kSuccess) {
      keep_first(first, driver_->error("cuStreamSynchronize", result));
    }
    if (const auto result = driver_->stream_destroy(domain.stream); result != cuda::kSuccess) {
      keep_first(first, driver_->error("cuStreamDestroy", result));
    }
  }
  if (domain.context != nullptr) {
    if (const auto result = driver_->green_context_destroy(domain.context); result != cuda::kSuccess) {
      keep_first(first, driver_->error("cuGreenCtxDestroy", result));
    }
  }
  domain = Domain{};
  return first;
}

std::string SmPartition::drop_device() {
  if (!retained_) {
    return {};
  }
  retained_ = false;
  const auto result = driver_->primary_context_release(device_);
  return result == cuda::kSuccess ? std::string{} : driver_->error("cuDevicePrimaryCtxRelease", result);
}

std::string SmPartition::close() {
  if (driver_ == nullptr) {
    return {};
  }
  std::string first = drop(compute_);
  keep_first(first, drop(io_));
  keep_first(first, drop_device());
  kind_ = PartitionKind::None;
  return first;
}

}  // namespace tutti
