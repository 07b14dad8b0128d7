// A model of NVMe controllers: threads that consume real submission entries from queue pairs in memory, move data
// between images (namespaces in memory) and the addresses that PRP or SGL name, and post completions. The issuer, GPU
// or thread, can't tell it from a drive; a test can make it return any status, late, out of order, or never.
//
// Data move by a CopyEngine: plain copies for host addresses, a kernel that gathers and scatters on the GPU for GPU
// addresses (as a drive's own DMA would reach them over PCIe). Invariants: a command is completed at most once, after
// its data have moved; after abort(queue) no memory that the queue's commands name is touched, and they never complete.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "tutti/fault.h"
#include "tutti/nvme/copy_engine.h"
#include "tutti/nvme/queue_server.h"
#include "tutti/nvme/soft_controller.h"

namespace tutti::nvme {

// What goes wrong: every `every`-th command that a thread of the model takes, at most `limit` times.
enum class ModelFaultKind : uint8_t { Code = 0, Delay = 1, Reorder = 2, Lose = 3 };
struct ModelFault {
  ModelFaultKind kind = ModelFaultKind::Code;
  uint64_t every = 1;
  uint64_t limit = UINT64_MAX;
  uint16_t code = 0;      // Code: sct << 8 | sc; no data move
  uint64_t delay_ns = 0;  // Delay: from the end of the data to the completion
  uint32_t others = 0;    // Reorder: completes after so many others, or when there are no others
};

struct MemoryControllerOptions {
  std::vector<std::pair<unsigned char*, uint64_t>> images;  // by namespace - 1: address and bytes; stay the caller's
  uint32_t logical_block_bytes = 512;
  uint32_t threads = 1;
  uint64_t largest_transfer = 0;  // MDTS in bytes; 0 = no limit
  bool sgl = true;                // whether commands with SGL are taken
  // One per thread; null = plain copies.
  std::vector<std::unique_ptr<CopyEngine>> engines;
};

class MemoryController : public SoftController {
 public:
  // `faults` may be null (the seam that all executors have); ModelFaults come besides.
  MemoryController(std::vector<ServedQueue> queues, MemoryControllerOptions options, FaultInjector* faults);
  ~MemoryController() override;

  void add_fault(const ModelFault& fault);
  void clear_faults();
  [[nodiscard]] uint64_t commands() const noexcept { return commands_.load(std::memory_order_relaxed); }
  // Most commands that were there and not completed at one time.
  [[nodiscard]] uint32_t most_in_flight() const noexcept { return most_.load(std::memory_order_relaxed); }

  void abort(uint32_t queue) override;

 private:
  class Lane;
  struct Rule {
    ModelFault fault;
    uint64_t seen = 0;
  };
  // The fault of the next command; every = 0 when it has none.
  ModelFault decide();

  const std::vector<ServedQueue> queues_;
  const MemoryControllerOptions options_;
  FaultInjector* faults_;
  std::vector<Rule> rules_;
  std::atomic<bool> has_rules_{false};
  std::atomic<uint64_t> commands_{0};
  std::atomic<uint32_t> in_flight_{0}, most_{0};
  // Queues to abort, and those that are: a lane moves them from the one to the other.
  std::vector<std::atomic<uint8_t>> aborts_;
};

}  // namespace tutti::nvme
