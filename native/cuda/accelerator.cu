// The I/O kernel on a CUDA device, and the memory that it shares with the host.
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "copy_engine.cuh"
#include "tutti/gio/accelerator.h"
#include "tutti/gio/issuer.h"
#include "warp.cuh"

namespace tutti::gio {
namespace {

__constant__ uint32_t kMultipliers[kChecksumBlockWords];

struct KernelShared {
  BlockShared block;
  alignas(16) uint32_t multipliers[kChecksumBlockWords];
};

__global__ void __launch_bounds__(1024) io_kernel(const KernelArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<KernelShared*>(memory);
  for (uint32_t i = threadIdx.x; i < sizeof(BlockShared) / 4; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(&shared.block)[i] = 0;
  }
  for (uint32_t i = threadIdx.x; i < kChecksumBlockWords; i += blockDim.x) {
    shared.multipliers[i] = kMultipliers[i];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.block.issuers = arguments.issuers_per_block;
    if (blockIdx.x == 0) {
      // From here on a host that issues more must launch again unless this kernel sees it: write, fence, then read.
      store_release(arguments.begun, arguments.number);
      fence_system();
    }
  }
  __syncthreads();
  CudaWarp warp(shared.multipliers);
  const uint32_t index = threadIdx.x / 32;
  if (index < arguments.issuers_per_block) {
    run_issuer(warp, arguments.ring, arguments.issuers[blockIdx.x * arguments.issuers_per_block + index],
               arguments.options, shared.block, index);
  } else {
    run_mover(warp, shared.block, arguments.options.payload_bytes);
  }
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) +
                             ")");
  }
}

class CudaAccelerator : public Accelerator {
 public:
  CudaAccelerator(int device, uint64_t stream) : device_(device) {
    check(cudaSetDevice(device), "choosing the GPU");
    int direct = 0;
    check(cudaDeviceGetAttribute(&direct, cudaDevAttrCanUseHostPointerForRegisteredMem, device), "asking the GPU");
    if (direct == 0) {
      throw std::runtime_error("GPU " + std::to_string(device) +
                               " can't use host addresses of registered memory; the executor uring-gpu needs that");
    }
    constexpr auto kMultiplierTable = checksum_multipliers();
    check(cudaMemcpyToSymbol(kMultipliers, kMultiplierTable.data(), sizeof(kMultipliers)), "loading the I/O kernel");
    check(cudaFuncSetAttribute(io_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(KernelShared)),
          "sizing the I/O kernel");
    if (stream != 0) {
      stream_ = reinterpret_cast<cudaStream_t>(stream);
    } else {
      int least = 0;
      int greatest = 0;
      check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities");
      check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "making the I/O stream");
      own_stream_ = true;
    }
    check(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), "making an event");
  }

  ~CudaAccelerator() override {
    cudaSetDevice(device_);
    cudaStreamSynchronize(stream_);
    for (auto& [ticket, event] : marks_) {
      cudaEventDestroy(event);
    }
    for (cudaEvent_t event : spare_) {
      cudaEventDestroy(event);
    }
    cudaEventDestroy(last_);
    if (own_stream_) {
      cudaStreamDestroy(stream_);
    }
    for (void* at : local_) {
      cudaFree(at);
    }
    for (void* at : pinned_) {
      cudaHostUnregister(at);
    }
    for (const auto& [at, bytes] : shared_) {
      cudaHostUnregister(at);
      munmap(at, bytes);
    }
  }

  void* shared(size_t bytes) override {
    enter();
    constexpr size_t kHuge = size_t{2} << 20;
    const size_t whole = (bytes + kHuge - 1) / kHuge * kHuge;
    void* at = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
      throw std::runtime_error("no memory for " + std::to_string(bytes) + " bytes of rings and slots");
    }
    madvise(at, whole, MADV_HUGEPAGE);
    std::memset(at, 0, whole);
    if (const cudaError_t error = cudaHostRegister(at, whole, cudaHostRegisterMapped | cudaHostRegisterPortable);
        error != cudaSuccess) {
      munmap(at, whole);
      cudaGetLastError();
      throw std::runtime_error("pinning " + std::to_string(whole) + " bytes: " + cudaGetErrorString(error) +
                               "; raise the locked-memory limit or lower pinned_bytes");
    }
    shared_.emplace_back(at, whole);
    return at;
  }

  void* local(size_t bytes) override {
    enter();
    void* at = nullptr;
    check(cudaMalloc(&at, bytes), "GPU memory for rings");
    local_.push_back(at);
    check(cudaMemset(at, 0, bytes), "clearing GPU memory");
    return at;
  }

  void fill(void* local, const void* from, size_t bytes) override {
    enter();
    check(cudaMemcpy(local, from, bytes, cudaMemcpyHostToDevice), "filling GPU memory");
  }

  void launch(const KernelArguments& arguments) override {
    enter();
    const uint32_t threads = 32 * (arguments.issuers_per_block + arguments.movers_per_block);
    cudaMemsetAsync(arguments.ring.unable, 0, sizeof(uint32_t), stream_);
    io_kernel<<<arguments.blocks, threads, sizeof(KernelShared), stream_>>>(arguments);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
      remember(error, "launching the I/O kernel");
      return;
    }
    cudaEventRecord(last_, stream_);
  }

  bool idle() override {
    enter();
    const cudaError_t error = cudaEventQuery(last_);
    if (error != cudaSuccess && error != cudaErrorNotReady) {
      remember(error, "the I/O kernel");
    }
    return error != cudaErrorNotReady;
  }

  std::string failure() override {
    idle();
    const std::lock_guard lock(failure_mutex_);
    return failure_;
  }

  bool drain(uint32_t ms) override {
    for (uint32_t waited = 0; !idle(); ++waited) {
      if (waited >= ms) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  // Called by the threads that submit plans, and `reached` by the one that feeds: hence the lock.
  uint64_t mark(uint64_t stream) override {
    enter();
    const std::lock_guard lock(marks_mutex_);
    cudaEvent_t event = nullptr;
    if (spare_.empty()) {
      if (const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming); error != cudaSuccess) {
        remember(error, "making an event");
        return 0;  // the plan ends with all others, by the failure
      }
    } else {
      event = spare_.back();
      spare_.pop_back();
    }
    if (const cudaError_t error = cudaEventRecord(event, reinterpret_cast<cudaStream_t>(stream));
        error != cudaSuccess) {
      spare_.push_back(event);
      remember(error, "recording an event");
      return 0;
    }
    marks_.emplace(++ticket_, event);
    return ticket_;
  }

  bool reached(uint64_t ticket) override {
    enter();
    const std::lock_guard lock(marks_mutex_);
    const auto found = marks_.find(ticket);
    if (found == marks_.end()) {
      return true;
    }
    const cudaError_t error = cudaEventQuery(found->second);
    if (error == cudaErrorNotReady) {
      return false;
    }
    if (error != cudaSuccess) {
      remember(error, "the engine's stream");
    }
    spare_.push_back(found->second);
    marks_.erase(found);
    return true;
  }

  void pin(void* at, size_t bytes, bool read_only) override {
    enter();
    check(
        cudaHostRegister(
            at, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable | (read_only ? cudaHostRegisterReadOnly : 0)),
        "pinning an image");
    pinned_.push_back(at);
  }
  std::unique_ptr<nvme::CopyEngine> copy_engine() override {
    auto* ring = static_cast<CopyRing*>(shared(sizeof(CopyRing)));
    return std::make_unique<CudaCopyEngine>(device_, ring, static_cast<CopyState*>(local(sizeof(CopyState))));
  }

 private:
  // The current device is each thread's own.
  void enter() const noexcept { cudaSetDevice(device_); }
  void remember(cudaError_t error, const char* what) {
    const std::lock_guard lock(failure_mutex_);
    if (failure_.empty()) {
      failure_ = std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")";
    }
  }

  const int device_;
  cudaStream_t stream_ = nullptr;
  bool own_stream_ = false;
  cudaEvent_t last_ = nullptr;
  std::mutex failure_mutex_;
  std::string failure_;
  std::vector<void*> local_;
  std::vector<void*> pinned_;
  std::vector<std::pair<void*, size_t>> shared_;
  std::mutex marks_mutex_;
  std::map<uint64_t, cudaEvent_t> marks_;
  std::vector<cudaEvent_t> spare_;
  uint64_t ticket_ = 0;
};

}  // namespace

std::unique_ptr<Accelerator> make_cuda_accelerator(int device, uint64_t stream) {
  return std::make_unique<CudaAccelerator>(device, stream);
}

std::string probe_cuda() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return std::string("no CUDA device can be used: ") + cudaGetErrorString(error);
  }
  return count == 0 ? "no CUDA device" : "";
}

}  // namespace tutti::gio
