// What every executor has: the queue of plans, their expansion into IOCBs, deadlines, and the end. How an IOCB's
// contexts are moved is each executor's own: threads that drive the devices (lane_executor.h), or a GPU's I/O kernel
// (gio/gio_executor.h).
//
// Invariants: a plan's memory is touched by nobody once it is drained; reads go before every write that waits; layers
// of one plan complete in order of issue as far as the devices allow.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tutti/fault.h"
#include "tutti/layout.h"
#include "tutti/plan.h"
#include "tutti/ring.h"
#include "tutti/slot_table.h"

namespace tutti {

struct DeviceFile {
  int fd = -1;                // O_DIRECT where the file system has it; stays the caller's
  uint32_t memory_align = 1;  // that the device wants of buffers
  uint32_t offset_align = 1;  // and of offsets and lengths
};

// Where object i of every engine block lies in the engine's memory: base + block*stride, payload_bytes long. `group`:
// which of the engine's block tables its layer follows.
struct TensorRegion {
  uint64_t base = 0;
  uint64_t stride = 0;
  uint64_t blocks = 0;
  uint32_t group = 0;
};

struct ExecutorStats {
  std::atomic<uint64_t> bytes_read{0}, bytes_written{0}, objects_read{0}, objects_written{0}, staged_objects{0};
  std::atomic<uint64_t> checksum_errors{0}, device_errors{0}, timeouts{0};
};

class Executor {
 public:
  // `table` gives the expected checksums of reads; `faults` may be null. Both outlive the executor.
  Executor(Layout layout, std::vector<DeviceFile> devices, const SlotTable* table, FaultInjector* faults);
  virtual ~Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // One region per object index. Starts the workers; once only. Rethrows what a worker threw that couldn't get what it
  // needs: none runs then.
  void start(std::vector<TensorRegion> regions);
  // Enqueues a plan; returns at once. Thread-safe. `stream`: what the caller has given this CUDA stream (handle; 0 =
  // the default stream) comes before the plan's I/O; kNoStream, and executors of host memory: nothing does.
  std::shared_ptr<Plan> submit(Direction direction, std::vector<uint32_t> slots, std::vector<uint32_t> generations,
                               std::vector<uint8_t> rots, std::vector<uint32_t> blocks, Clock::time_point deadline,
                               uint64_t stream = kNoStream);
  // Lets running operations end (at most `grace`), cancels the rest, joins the workers.
  void stop(std::chrono::milliseconds grace);

  static constexpr uint64_t kNoStream = UINT64_MAX;

  [[nodiscard]] const ExecutorStats& stats() const noexcept { return stats_; }
  [[nodiscard]] bool started() const noexcept { return started_.load(std::memory_order_acquire); }
  // What people should know of how the workers run, for example without registered buffers; empty when nothing.
  [[nodiscard]] std::string note() const;

  // --- for workers ---
  void expire_plans();
  // Sleeps until there may be work that wasn't there when epoch() gave `seen`.
  void wait_for_work(uint64_t seen);
  [[nodiscard]] uint64_t epoch() const noexcept { return epoch_.load(std::memory_order_acquire); }
  void note(std::string what);
  [[nodiscard]] bool stopping() const noexcept { return stopping_.load(std::memory_order_acquire); }
  [[nodiscard]] uint64_t io_bytes() const noexcept { return layout_.object_bytes; }
  [[nodiscard]] const Layout& layout() const noexcept { return layout_; }
  [[nodiscard]] const std::vector<DeviceFile>& devices() const noexcept { return devices_; }
  [[nodiscard]] const std::vector<TensorRegion>& regions() const noexcept { return regions_; }
  [[nodiscard]] FaultInjector* faults() const noexcept { return faults_; }
  // The engine's memory without gaps: [first, second) addresses.
  [[nodiscard]] const std::vector<std::pair<uint64_t, uint64_t>>& ranges() const noexcept { return ranges_; }

 protected:
  virtual void start_workers() = 0;
  virtual void join_workers() = 0;
  // Pieces of the engine's memory that a context may name by index are at most this long.
  [[nodiscard]] virtual uint64_t largest_range() const noexcept { return UINT64_MAX; }
  // A free IOCB, or nullptr; and its submission once it is filled.
  virtual Iocb* obtain() noexcept = 0;
  virtual void issue(Iocb& iocb, Plan& plan) noexcept = 0;
  [[nodiscard]] virtual uint32_t contexts_per_iocb(const Plan& plan) const noexcept = 0;
  // What a plan given after `stream`'s work has to wait for, and whether it still has.
  virtual uint64_t mark(uint64_t /*stream*/) { return 0; }
  virtual bool reached(uint64_t /*ticket*/) { return true; }

  // Expands waiting plans while there are free IOCBs. One thread at a time does; others return at once.
  void feed();
  void announce();
  // Counts the end of an object in the statistics.
  void count(Direction direction, Status status) noexcept;

  const Layout layout_;
  const std::vector<DeviceFile> devices_;
  FaultInjector* faults_;
  ExecutorStats stats_;

 private:
  // Reads the checksums that the plan's first `blocks` blocks must have, from the slots' records.
  void expect(Plan& plan, uint32_t blocks);
  void fill(Iocb& iocb, Plan& plan, uint64_t first, uint32_t count);
  void merge_regions();

  const SlotTable* table_;
  std::vector<TensorRegion> regions_;
  std::vector<std::pair<uint64_t, uint64_t>> ranges_;
  uint32_t groups_ = 1;

  std::mutex feed_mutex_;
  mutable std::mutex mutex_;  // waiting_, active_, note_
  std::condition_variable work_;
  std::deque<std::shared_ptr<Plan>> waiting_;
  std::vector<std::shared_ptr<Plan>> active_;  // submitted and not drained; keeps plans alive for the ring
  std::atomic<uint64_t> epoch_{0};
  std::atomic<bool> started_{false};
  std::atomic<bool> stopping_{false};
  std::string note_;
};

// What the kernel says about direct I/O on an open file: memory and offset alignment in bytes; 0, 0 = it doesn't say.
std::pair<uint32_t, uint32_t> direct_io_alignment(int fd);

// For Fault::Corrupt.
void flip_bit(unsigned char* data, uint64_t bytes, uint64_t seed) noexcept;

}  // namespace tutti
