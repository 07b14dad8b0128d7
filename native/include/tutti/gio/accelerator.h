// Who runs the I/O kernel: a CUDA device, or threads of this process (for tests, and where there is no GPU).
//
// Memory comes in two kinds: `shared`, which host, kernel and controllers read and write at one address, and `local`,
// which the kernel's warps change atomically and the host only fills and empties between kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tutti/gio/shared.h"
#include "tutti/nvme/copy_engine.h"

namespace tutti::gio {

struct KernelArguments {
  RingView ring;
  IssueOptions options;
  const IssuerQueues* issuers = nullptr;  // [options.issuers], local memory
  uint32_t blocks = 1;
  uint32_t issuers_per_block = 1;
  uint32_t movers_per_block = 1;  // moving warps
  // Shared words with which host and kernel agree on whether a kernel is still to begin: its number when it begins.
  uint32_t* begun = nullptr;
  uint32_t number = 0;
};

// Not thread-safe: one thread drives it. Allocations throw std::runtime_error that says what failed and why; memory is
// zeroed, and is freed with the accelerator at the latest.
class Accelerator {
 public:
  virtual ~Accelerator() = default;
  Accelerator() = default;
  Accelerator(const Accelerator&) = delete;
  Accelerator& operator=(const Accelerator&) = delete;

  virtual void* shared(size_t bytes) = 0;
  virtual void* local(size_t bytes) = 0;
  // Copies into local memory; waits.
  virtual void fill(void* local, const void* from, size_t bytes) = 0;
  // Starts a kernel behind those started before; returns at once. `ring.unable` is zeroed first.
  virtual void launch(const KernelArguments& arguments) = 0;
  // Whether every kernel that was launched has ended. Never blocks.
  virtual bool idle() = 0;
  // Empty while all is well; else why no kernel can run any more (a CUDA error that sticks). Never blocks.
  virtual std::string failure() = 0;
  // Waits until idle, at most `ms`. Whether it is.
  virtual bool drain(uint32_t ms) = 0;
  // Remembers where a stream of the caller stands (a CUDA stream handle; 0 = the default stream): work given `after`
  // the returned ticket begins only when `reached(ticket)`. 0 = nothing to wait for.
  virtual uint64_t mark(uint64_t stream) = 0;
  virtual bool reached(uint64_t ticket) = 0;

  // For the controller model: lets kernels reach memory of this process, and moves data between it and what kernels
  // reach. An engine ends before its accelerator does.
  virtual void pin(void* at, size_t bytes, bool read_only) = 0;
  virtual std::unique_ptr<nvme::CopyEngine> copy_engine() = 0;
};

std::unique_ptr<Accelerator> make_host_accelerator();

// `stream`: a CUstream handle for the kernels, for example of an SM partition; 0 = a high-priority stream of its own.
// Throws std::runtime_error when this build or this machine has no CUDA.
std::unique_ptr<Accelerator> make_cuda_accelerator(int device, uint64_t stream);

// Empty when make_cuda_accelerator would work, else why not.
std::string probe_cuda();

}  // namespace tutti::gio
