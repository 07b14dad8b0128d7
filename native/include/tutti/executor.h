// The CPU executors: lanes (threads) that take IOCBs from the ring and move bytes between devices and host tensors.
//
// `uring`: each lane drives its own io_uring with O_DIRECT, registered files and, where the memlock limit allows,
// registered buffers. `posix`: each lane moves one object at a time by preadv2/pwritev2, for kernels or container
// profiles that refuse io_uring. Both check (read) or make (write) each object's checksum in the thread that moved it,
// and bounce through aligned staging memory only where the device can't take the tensor's own memory.
//
// Invariants: a plan's memory is touched by nobody once it is drained; nothing in a lane throws or allocates per
// object; layers of one plan complete in order of issue as far as the devices allow.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tutti/fault.h"
#include "tutti/layout.h"
#include "tutti/plan.h"
#include "tutti/ring.h"
#include "tutti/slot_table.h"

namespace tutti {

enum class ExecutorKind : uint8_t { Uring = 0, Posix = 1 };

struct DeviceFile {
  int fd = -1;                // O_DIRECT where the file system has it; stays the caller's
  uint32_t memory_align = 1;  // that the device wants of buffers
  uint32_t offset_align = 1;  // and of offsets and lengths
};

// Where object i of every engine block lies in host memory: base + block*stride, payload_bytes long. `group`: which of
// the engine's block tables its layer follows.
struct TensorRegion {
  uint64_t base = 0;
  uint64_t stride = 0;
  uint64_t blocks = 0;
  uint32_t group = 0;
};

struct ExecutorOptions {
  ExecutorKind kind = ExecutorKind::Uring;
  uint32_t lanes = 1;
  uint32_t queue_depth = 64;  // operations in flight per lane (uring)
  uint32_t iocbs = 16;
  bool register_buffers = true;
};

struct ExecutorStats {
  std::atomic<uint64_t> bytes_read{0}, bytes_written{0}, objects_read{0}, objects_written{0}, staged_objects{0};
  std::atomic<uint64_t> checksum_errors{0}, device_errors{0}, timeouts{0};
};

class Executor {
 public:
  // `table` gives the expected checksums of reads; `faults` may be null. Both outlive the executor.
  Executor(Layout layout, std::vector<DeviceFile> devices, ExecutorOptions options, const SlotTable* table,
           FaultInjector* faults);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // One region per object index. Starts the lanes; once only. Rethrows what a lane threw that couldn't get its ring or
  // memory: no lane runs then.
  void start(std::vector<TensorRegion> regions);
  // Enqueues a plan; returns at once. Thread-safe.
  std::shared_ptr<Plan> submit(Direction direction, std::vector<uint32_t> slots, std::vector<uint32_t> generations,
                               std::vector<uint8_t> rots, std::vector<uint32_t> blocks, Clock::time_point deadline);
  // Lets running operations end (at most `grace`), cancels the rest, joins the lanes.
  void stop(std::chrono::milliseconds grace);

  [[nodiscard]] const ExecutorStats& stats() const noexcept { return stats_; }
  [[nodiscard]] bool started() const noexcept { return !lanes_.empty(); }
  // Why the lanes run without registered buffers; empty when they have them.
  [[nodiscard]] std::string buffer_note() const;

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
  // Sleeps until there may be work that wasn't there when epoch() gave `seen`.
  void wait_for_work(uint64_t seen);
  [[nodiscard]] uint64_t epoch() const noexcept { return epoch_.load(std::memory_order_acquire); }
  void expire_plans();
  void hang_until_released();  // Fault::Hang in a lane that blocks
  void note_buffers(std::string why);
  [[nodiscard]] bool stopping() const noexcept { return stopping_.load(std::memory_order_acquire); }
  [[nodiscard]] uint64_t io_bytes() const noexcept { return layout_.object_bytes; }
  [[nodiscard]] const Layout& layout() const noexcept { return layout_; }
  [[nodiscard]] const std::vector<DeviceFile>& devices() const noexcept { return devices_; }
  [[nodiscard]] const std::vector<TensorRegion>& regions() const noexcept { return regions_; }
  [[nodiscard]] const ExecutorOptions& options() const noexcept { return options_; }
  [[nodiscard]] FaultInjector* faults() const noexcept { return faults_; }

  // Contiguous host memory to register: [first, second) addresses, at most 1 GiB each, page aligned inwards.
  [[nodiscard]] std::vector<std::pair<uint64_t, uint64_t>> registered_ranges() const;

 private:
  void feed();
  void announce();
  // Reads the checksums that the plan's first `blocks` blocks must have, from the slots' records.
  void expect(Plan& plan, uint32_t blocks);
  void fill(Iocb& iocb, const std::shared_ptr<Plan>& plan, uint64_t first, uint32_t count);
  void end_item(Iocb& iocb, Plan& plan, Item item, uint16_t status_slot, Status status) noexcept;
  [[nodiscard]] bool direct_possible(const TensorRegion& region, const DeviceFile& device) const noexcept;

  const Layout layout_;
  const std::vector<DeviceFile> devices_;
  const ExecutorOptions options_;
  const SlotTable* table_;
  FaultInjector* faults_;
  std::vector<TensorRegion> regions_;
  uint32_t groups_ = 1;
  std::vector<uint8_t> staged_;  // per object and device: needs staging memory
  std::vector<std::pair<uint64_t, uint64_t>> ranges_;
  Ring ring_;
  ExecutorStats stats_;

  std::mutex feed_mutex_;     // one thread expands plans at a time
  mutable std::mutex mutex_;  // waiting_, active_, note
  std::condition_variable work_;
  std::deque<std::shared_ptr<Plan>> waiting_;
  std::vector<std::shared_ptr<Plan>> active_;  // submitted and not drained; keeps plans alive for the ring
  std::atomic<uint64_t> epoch_{0};
  std::atomic<bool> stopping_{false};
  std::string buffer_note_;
  std::vector<std::thread> lanes_;
};

// Lane bodies. Each calls ready() once it has what it needs, or throws before; it returns when the executor stops and
// nothing is in flight.
void run_uring_lane(Executor& executor, const std::function<void()>& ready);
void run_posix_lane(Executor& executor, const std::function<void()>& ready);

// Empty when io_uring can be used here, else why not.
std::string probe_uring();
// What the kernel says about direct I/O on an open file: memory and offset alignment in bytes; 0, 0 = it doesn't say.
std::pair<uint32_t, uint32_t> direct_io_alignment(int fd);

}  // namespace tutti
