// The data mover of the controller model on a GPU: a kernel that copies between pinned images and GPU memory as a
// drive's DMA would, told what to copy through a ring in pinned memory. The kernel leaves when all its blocks have been
// idle for a while, and is launched again with the next work. The blocks leave together: a new kernel begins only when
// the whole one before has ended, so that the work of a block that had left alone would wait for the others' leisure.
#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tutti/host_device.h"
#include "tutti/nvme/copy_engine.h"

namespace tutti::gio {

inline constexpr uint32_t kCopyRing = 64;
inline constexpr uint32_t kCopyUnroll = 4;  // loads of a thread in flight: a 64 KiB object at once

// Two halves of 16 bytes, each read at once and each with the turn in it: a reader knows by the turns that both are
// new.
struct alignas(32) CopyTask {
  uint64_t source;
  uint32_t bytes;
  uint32_t turn;
  uint64_t target;
  uint32_t reserved;
  uint32_t turn_again;
};

inline constexpr uint32_t kCopyBlocks = 8;  // block b does turns b, b + kCopyBlocks, ...

struct CopyRing {
  CopyTask tasks[kCopyRing];
  // By block, in cache lines of their own:
  uint32_t done[32 * kCopyBlocks];  // the turn after its last that has ended
  uint32_t left[32 * kCopyBlocks];  // number of the launch whose block has left, or is about to
};

// In GPU memory, zero before the first kernel.
struct CopyState {
  uint64_t last_work;           // when any block ended its last turn, on the GPU's clock
  uint32_t closing;             // number of the launch whose blocks leave
  uint32_t turns[kCopyBlocks];  // of each block's next task, from kernel to kernel; 0 = its first one
};

__device__ inline uint64_t gpu_clock_ns() noexcept {
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void __launch_bounds__(1024)
    copy_kernel(CopyRing* ring, CopyState* state, uint32_t launch, uint64_t linger_ns) {
  __shared__ CopyTask task;
  __shared__ uint32_t go;
  uint32_t turn = state->turns[blockIdx.x] == 0 ? blockIdx.x : state->turns[blockIdx.x];
  const uint64_t begun = gpu_clock_ns();
  for (;;) {
    if (threadIdx.x == 0) {
      const CopyTask* at = &ring->tasks[turn % kCopyRing];
      bool leaving = false;
      for (;;) {
        uint4 low;
        uint4 high;
        asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(low.x), "=r"(low.y), "=r"(low.z), "=r"(low.w)
                     : "l"(at)
                     : "memory");
        asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(high.x), "=r"(high.y), "=r"(high.z), "=r"(high.w)
                     : "l"(&at->target)
                     : "memory");
        if (low.w == turn + 1 && high.w == turn + 1) {
          task.source = static_cast<uint64_t>(low.y) << 32 | low.x;
          task.bytes = low.z;
          task.target = static_cast<uint64_t>(high.y) << 32 | high.x;
          if (leaving) {
            store_release(&ring->left[32 * blockIdx.x], 0U);
          }
          asm volatile("fence.acq_rel.sys;" ::: "memory");  // what was there before the task is seen after it
          go = 1;
          break;
        }
        // Whoever leaves says so and looks once more; whoever posts looks whether somebody left. One sees the other.
        if (leaving) {
          go = 0;
          break;
        }
        const uint64_t now = gpu_clock_ns();
        if (now > begun + linger_ns && now > gpu_load(&state->last_work) + linger_ns) {
          atomicExch(&state->closing, launch);
        }
        if (gpu_load(&state->closing) == launch) {
          leaving = true;
          store_release(&ring->left[32 * blockIdx.x], launch);
          fence_system();
        }
      }
    }
    __syncthreads();
    if (go == 0) {
      if (threadIdx.x == 0) {
        state->turns[blockIdx.x] = turn;
      }
      return;
    }
    const uint64_t source = task.source;
    const uint64_t target = task.target;
    const uint32_t bytes = task.bytes;
    if (((source | target | bytes) & 15) == 0) {
      const auto* from = reinterpret_cast<const uint4*>(source);
      auto* to = reinterpret_cast<uint4*>(target);
      const uint32_t words = bytes / 16;
      for (uint32_t i = threadIdx.x; i < words; i += kCopyUnroll * blockDim.x) {
        uint4 held[kCopyUnroll];
#pragma unroll
        for (uint32_t j = 0; j < kCopyUnroll; ++j) {
          if (i + j * blockDim.x < words) {
            held[j] = from[i + j * blockDim.x];
          }
        }
#pragma unroll
        for (uint32_t j = 0; j < kCopyUnroll; ++j) {
          if (i + j * blockDim.x < words) {
            to[i + j * blockDim.x] = held[j];
          }
        }
      }
    } else {
      const auto* from = reinterpret_cast<const unsigned char*>(source);
      auto* to = reinterpret_cast<unsigned char*>(target);
      for (uint32_t i = threadIdx.x; i < bytes; i += blockDim.x) {
        to[i] = from[i];
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      store_release(&ring->done[32 * blockIdx.x], turn + 1);
      atomicMax(reinterpret_cast<unsigned long long*>(&state->last_work), gpu_clock_ns());
    }
    turn += kCopyBlocks;
  }
}

class CudaCopyEngine : public nvme::CopyEngine {
 public:
  // `ring`: zeroed pinned memory; `state`: zeroed GPU memory. Both outlive the engine.
  CudaCopyEngine(int device, CopyRing* ring, CopyState* state) : device_(device), ring_(ring), state_(state) {
    // Loaded now: the driver loads a kernel at its first launch otherwise, and waits for those that run to do so.
    cudaFuncAttributes attributes{};
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, copy_kernel); error != cudaSuccess) {
      throw std::runtime_error(std::string("loading the copy kernel: ") + cudaGetErrorString(error));
    }
    // Of another priority than the I/O kernel's stream, so that they don't share a hardware queue.
    if (const cudaError_t error = cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, 0);
        error != cudaSuccess) {
      throw std::runtime_error(std::string("making a stream: ") + cudaGetErrorString(error));
    }
  }
  ~CudaCopyEngine() override {
    cudaSetDevice(device_);
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }

  bool begin(uint32_t tag, const std::vector<nvme::CopyPart>& parts) override {
    if (posted_ - taken_ + parts.size() > kCopyRing) {
      return false;
    }
    for (const auto& part : parts) {
      CopyTask& task = ring_->tasks[posted_ % kCopyRing];
      task.source = part.source;
      task.bytes = static_cast<uint32_t>(part.bytes);
      task.target = part.target;
      ++posted_;
      store_release(&task.turn, posted_);
      store_release(&task.turn_again, posted_);
    }
    ends_.push_back({tag, posted_});
    fence_system();
    bool left = launched_ == 0;
    for (uint32_t turn = posted_ - static_cast<uint32_t>(parts.size()); turn != posted_; ++turn) {
      left = left || has_left(turn);
    }
    if (left && !running()) {
      launch();
    }
    return true;
  }

  uint32_t poll() override {
    if (ends_.empty()) {
      return UINT32_MAX;
    }
    while (taken_ != ends_.front().second &&
           static_cast<int32_t>(load_acquire(&ring_->done[32 * (taken_ % kCopyBlocks)]) - (taken_ + 1)) >= 0) {
      ++taken_;
    }
    if (taken_ != ends_.front().second) {
      if (has_left(taken_) && !running()) {  // it left just before the task came
        launch();
      }
      return UINT32_MAX;
    }
    const uint32_t tag = ends_.front().first;
    ends_.pop_front();
    return tag;
  }

 private:
  // Whether the block that is to do this turn has left, as far as it has said: asking the driver costs microseconds.
  bool has_left(uint32_t turn) const { return load_acquire(&ring_->left[32 * (turn % kCopyBlocks)]) == launched_; }
  bool running() {
    cudaSetDevice(device_);
    return cudaStreamQuery(stream_) == cudaErrorNotReady;
  }
  void launch() {
    cudaSetDevice(device_);
    copy_kernel<<<kCopyBlocks, 1024, 0, stream_>>>(ring_, state_, ++launched_, kLingerNs);
  }

  static constexpr uint64_t kLingerNs = 1'000'000;
  const int device_;
  CopyRing* ring_;
  CopyState* state_;
  cudaStream_t stream_ = nullptr;
  uint32_t posted_ = 0;
  uint32_t taken_ = 0;  // turns that poll() has seen end, in order
  uint32_t launched_ = 0;
  std::deque<std::pair<uint32_t, uint32_t>> ends_;  // tag, turn after its last part
};

}  // namespace tutti::gio
