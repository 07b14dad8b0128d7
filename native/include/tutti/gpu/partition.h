// Parts of one GPU's streaming multiprocessors (SMs): an I/O domain for I/O kernels, a compute domain for the model, by
// green contexts (Tutti, section on SM partition). An I/O kernel then starts at once, however busy the model keeps its
// own SMs; that holds only for model work on the compute domain's stream.
//
// The split gives the I/O domain exactly what was asked for; the compute domain is the remainder. Where the driver or
// the device can't do that, there is one non-blocking stream of the highest priority for I/O, none for compute, and a
// reason. Where there is no usable GPU at all, there is no stream either.
//
// Invariants: what was made before a step failed is destroyed again, in reverse order, before the next thing is tried;
// streams go before their green contexts, those before the primary context's retain; the calling thread's current
// context is afterwards what it was before. The primary context is the one that PyTorch uses, so that memory, kernels
// and events work across all of it.
//
// Not thread-safe: one thread makes and closes it; the streams may be used by any thread meanwhile.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tutti/gpu/cuda_abi.h"

namespace tutti {

namespace cuda {
class Driver;
}

enum class PartitionKind : uint8_t {
  None = 0,      // no stream: no GPU, no driver, or it fails
  Priority = 1,  // one stream of the highest priority, for I/O; all SMs are shared
  Green = 2,     // two green contexts, one stream in each
};

struct PartitionOptions {
  int device = 0;       // ordinal
  uint32_t io_sms = 8;  // Hopper: a multiple of 8
  std::string library = "libcuda.so.1";
};

class SmPartition {
 public:
  // Throws std::invalid_argument, which says what is possible, where the device could be split but not so. Everything
  // else that fails leads to a lesser kind, with its reason.
  explicit SmPartition(const PartitionOptions& options);
  ~SmPartition();
  SmPartition(const SmPartition&) = delete;
  SmPartition& operator=(const SmPartition&) = delete;

  // Waits for the work on the streams and gives everything back. Returns what went wrong, empty when nothing did; may
  // be called again. Nobody may use the streams any more, nor hold memory whose release depends on them.
  std::string close();

  [[nodiscard]] PartitionKind kind() const noexcept { return kind_; }
  // Why it is not green contexts; empty when it is.
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
  [[nodiscard]] uint32_t io_sms() const noexcept { return io_.sms; }            // 0 unless Green
  [[nodiscard]] uint32_t compute_sms() const noexcept { return compute_.sms; }  // 0 unless Green
  [[nodiscard]] uint32_t device_sms() const noexcept { return device_sms_; }    // 0 where unknown
  // CUstream handles; 0 = there is none (and not CUDA's default stream).
  [[nodiscard]] uint64_t io_stream() const noexcept { return reinterpret_cast<uint64_t>(io_.stream); }
  [[nodiscard]] uint64_t compute_stream() const noexcept { return reinterpret_cast<uint64_t>(compute_.stream); }

 private:
  struct Domain {
    uint32_t sms = 0;
    cuda::GreenContext context = nullptr;
    cuda::Stream stream = nullptr;
  };

  // Each returns what went wrong, empty when nothing did.
  std::string open_device(int ordinal);
  std::string make_green(uint32_t io_sms);
  std::string make_domain(cuda::Resource& resource, int priority, Domain& domain);
  std::string make_priority_stream();
  std::string drop(Domain& domain);
  std::string drop_device();
  // The smallest part and the step of its size; from the driver, or by architecture where it is too old to tell.
  [[nodiscard]] cuda::SmResource granularity(const cuda::Resource& all) const;

  std::unique_ptr<cuda::Driver> driver_;
  PartitionKind kind_ = PartitionKind::None;
  std::string reason_;
  cuda::Device device_ = 0;
  bool retained_ = false;
  uint32_t device_sms_ = 0;
  int least_priority_ = 0, greatest_priority_ = 0;
  Domain io_, compute_;
};

}  // namespace tutti
