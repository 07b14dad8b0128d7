// The CPU executors: lanes (threads) that take IOCBs from the ring and move bytes between devices and host tensors.
//
// `uring`: each lane drives its own io_uring with O_DIRECT, registered files and, where the memlock limit allows,
// registered buffers. `posix`: each lane moves one object at a time by preadv2/pwritev2, for kernels or container
// profiles that refuse io_uring. Both check (read) or make (write) each object's checksum in the thread that moved it,
// and bounce through aligned staging memory only where the device can't take the tensor's own memory. Invariant:
// nothing in a lane throws or allocates per object.
#pragma once

#include <functional>
#include <thread>

#include "tutti/executor.h"

namespace tutti {

enum class ExecutorKind : uint8_t { Uring = 0, Posix = 1 };

struct LaneOptions {
  ExecutorKind kind = ExecutorKind::Uring;
  uint32_t lanes = 1;
  uint32_t queue_depth = 64;  // operations in flight per lane (uring)
  uint32_t iocbs = 16;
  bool register_buffers = true;
};

class LaneExecutor : public Executor {
 public:
  LaneExecutor(Layout layout, std::vector<DeviceFile> devices, LaneOptions options, const SlotTable* table,
               FaultInjector* faults);
  ~LaneExecutor() override;

  // --- for lanes ---
  struct Transfer {  // one object in flight
    Iocb* iocb = nullptr;
    Item item{};
    uint16_t status_slot = 0;
    uint32_t device = 0;
    uint64_t offset = 0;
    unsigned char* tensor = nullptr;
    unsigned char* buffer = nullptr;  // the tensor, or the lane's staging memory
    uint32_t registered = kNoBuffer;
    Fault fault{};
    uint32_t retries = 0;
  };
  // The next IOCB; feeds the ring from waiting plans when it is empty. Null when there is nothing to do.
  Iocb* next_iocb();
  // Fills `transfer` for context `index`. False when the item was ended instead (its plan is over).
  bool begin(Iocb& iocb, uint16_t index, unsigned char* staging, Transfer& transfer);
  // Ends a transfer with the result of its I/O: checks, copies out of staging, counts, tells the plan.
  void finish(Transfer& transfer, int64_t result);
  void hang_until_released();  // Fault::Hang in a lane that blocks
  [[nodiscard]] const LaneOptions& options() const noexcept { return options_; }

 private:
  void start_workers() override;
  void join_workers() override;
  [[nodiscard]] uint64_t largest_range() const noexcept override { return uint64_t{1} << 30; }  // of one registration
  Iocb* obtain() noexcept override;
  void issue(Iocb& iocb, Plan& plan) noexcept override;
  [[nodiscard]] uint32_t contexts_per_iocb(const Plan& plan) const noexcept override;
  void end_item(Iocb& iocb, Plan& plan, Item item, uint16_t status_slot, Status status) noexcept;
  [[nodiscard]] bool direct_possible(const TensorRegion& region, const DeviceFile& device) const noexcept;

  const LaneOptions options_;
  std::vector<uint8_t> staged_;  // per object and device: needs staging memory
  Ring ring_;
  std::vector<std::thread> lanes_;
};

// Lane bodies. Each calls ready() once it has what it needs, or throws before; it returns when the executor stops and
// nothing is in flight.
void run_uring_lane(LaneExecutor& executor, const std::function<void()>& ready);
void run_posix_lane(LaneExecutor& executor, const std::function<void()>& ready);

// Empty when io_uring can be used here, else why not.
std::string probe_uring();

}  // namespace tutti
