// The I/O kernel on threads: each warp of a block is a thread, each launch runs after the one before.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tutti/gio/accelerator.h"
#include "tutti/gio/host_warp.h"
#include "tutti/gio/issuer.h"

namespace tutti::gio {
namespace {

class HostAccelerator : public Accelerator {
 public:
  ~HostAccelerator() override {
    if (runner_.joinable()) {
      runner_.join();
    }
    for (void* memory : memory_) {
      std::free(memory);
    }
  }

  void* shared(size_t bytes) override {
    constexpr size_t kAlign = 4096;
    void* at = std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
    if (at == nullptr) {
      throw std::runtime_error("no memory for " + std::to_string(bytes) + " bytes of rings");
    }
    std::memset(at, 0, bytes);
    memory_.push_back(at);
    return at;
  }
  void* local(size_t bytes) override { return shared(bytes); }
  void fill(void* local, const void* from, size_t bytes) override { std::memcpy(local, from, bytes); }

  void launch(const KernelArguments& arguments) override {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(arguments);
    if (!running_) {
      if (runner_.joinable()) {
        runner_.join();
      }
      running_ = true;
      runner_ = std::thread([this] { run(); });
    }
  }
  bool idle() override {
    const std::lock_guard lock(mutex_);
    return !running_;
  }
  std::string failure() override { return {}; }
  bool drain(uint32_t ms) override {
    for (uint32_t waited = 0; !idle(); ++waited) {
      if (waited >= ms) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  uint64_t mark(uint64_t /*stream*/) override { return 0; }
  bool reached(uint64_t /*ticket*/) override { return true; }
  void pin(void* /*at*/, size_t /*bytes*/, bool /*read_only*/) override {}
  std::unique_ptr<nvme::CopyEngine> copy_engine() override { return nvme::make_host_copy_engine(); }

 private:
  void run() {
    for (;;) {
      KernelArguments arguments;
      {
        const std::lock_guard lock(mutex_);
        if (waiting_.empty()) {
          running_ = false;
          return;
        }
        arguments = waiting_.front();
        waiting_.erase(waiting_.begin());
      }
      kernel(arguments);
    }
  }

  static void kernel(const KernelArguments& arguments) {
    __atomic_store_n(arguments.ring.unable, 0U, __ATOMIC_RELEASE);
    store_release(arguments.begun, arguments.number);
    fence_system();
    std::vector<std::thread> warps;
    std::vector<std::unique_ptr<BlockShared>> blocks;
    for (uint32_t block = 0; block < arguments.blocks; ++block) {
      blocks.push_back(std::make_unique<BlockShared>());
      BlockShared& shared = *blocks.back();
      shared.issuers = arguments.issuers_per_block;
      for (uint32_t issuer = 0; issuer < arguments.issuers_per_block; ++issuer) {
        warps.emplace_back([&arguments, &shared, block, issuer] {
          HostWarp warp;
          run_issuer(warp, arguments.ring, arguments.issuers[block * arguments.issuers_per_block + issuer],
                     arguments.options, shared, issuer);
        });
      }
      for (uint32_t mover = 0; mover < arguments.movers_per_block; ++mover) {
        warps.emplace_back([&arguments, &shared] {
          HostWarp warp;
          run_mover(warp, shared, arguments.options.payload_bytes);
        });
      }
    }
    for (auto& warp : warps) {
      warp.join();
    }
  }

  std::mutex mutex_;
  std::vector<KernelArguments> waiting_;
  bool running_ = false;
  std::thread runner_;
  std::vector<void*> memory_;
};

}  // namespace

std::unique_ptr<Accelerator> make_host_accelerator() { return std::make_unique<HostAccelerator>(); }

}  // namespace tutti::gio
