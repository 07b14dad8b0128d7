// I/O between files and GPU memory by NVIDIA's cuFile batches (GPUDirect Storage), in the form of a lane: requests go
// in, (tag, status) come out in any order.
//
// One handle per device file, GPU memory registered once, a few batches of at most 128 entries in flight. A batch's
// handle is used again only after a run in which every entry completed. At its deadline, on cancel() and after an error
// of the interface a batch is cancelled; cuFile then has `cancel_grace` to tell how each entry ended.
//
// Invariants:
//   - Every accepted request yields exactly one completion with `settled`: cuFile has done with its memory. One that
//   cuFile
//     still hasn't ended after the grace yields one before it without `settled`: its outcome is known, its memory isn't
//     free, since the device may still write there.
//   - The handle of such a batch takes no more requests. It is destroyed when its last entry has ended, or at close().
//   - What was set up is taken down in reverse order, in the error paths too. Only if entries are unsettled at close(),
//     buffers, file handles and the driver stay as they are: taking them from under running DMA is worse than the leak.
//   - Nothing throws or allocates after construction and registration.
//
// Not thread-safe: one thread owns a lane. The GPU's primary context must be current in it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tutti/gds/cufile_abi.h"
#include "tutti/plan.h"
#include "tutti/ring.h"
#include "tutti/status.h"

namespace tutti {

namespace cufile {
class Session;
struct Library;
}  // namespace cufile

inline constexpr uint32_t kMaxGdsBatch = 128;  // cuFile's own default bound (io_batchsize)

struct GdsOptions {
  std::string library = "libcufile.so.0";
  uint32_t batch_entries = kMaxGdsBatch;  // cut to what the library allows
  uint32_t batches = 4;
  std::chrono::milliseconds cancel_grace{1000};
  std::function<Clock::time_point()> now = Clock::now;  // for deadlines and grace
};

struct GdsRequest {
  uint64_t tag = 0;  // the caller's, given back
  uint32_t file = 0;
  Direction direction = Direction::Read;
  uint64_t offset = 0;   // in the file
  uint64_t address = 0;  // of GPU memory inside one registered buffer
  uint64_t bytes = 0;
};

struct GdsCompletion {
  uint64_t tag = 0;
  Status status = Status::Ok;
  bool settled = true;
  int64_t result = 0;  // bytes moved, or a negative errno or cuFile error
};

class GdsLane {
 public:
  // `fds`: open with O_DIRECT; they stay the caller's and outlive the lane. Throws std::runtime_error with cuFile's
  // error.
  GdsLane(const std::vector<int>& fds, GdsOptions options);
  ~GdsLane();
  GdsLane(const GdsLane&) = delete;
  GdsLane& operator=(const GdsLane&) = delete;

  // Pins GPU memory for direct access until close(). Throws std::runtime_error (cuFile's error;
  // GPU_MEMORY_PINNING_FAILED usually means properties.max_device_pinned_mem_size_kb of cufile.json) or
  // std::invalid_argument (overlaps another).
  void register_buffer(uint64_t address, uint64_t bytes);

  // Takes requests from the front, at most one batch; returns how many. 0: poll() first. A request that can't be
  // (BadState) or that cuFile doesn't take (Retry, DeviceError) counts as taken and completes with that status.
  size_t submit(std::span<const GdsRequest> requests, Clock::time_point deadline) noexcept;

  // Gives completions out, waiting for the first at most `wait` where something runs.
  size_t poll(std::span<GdsCompletion> out, std::chrono::microseconds wait) noexcept;

  // Cancels everything that runs; completions follow as Cancelled, or as what they really became.
  void cancel() noexcept;

  // Cancels what runs, gives it `cancel_grace`, takes everything down. False: entries are unsettled, and their memory
  // must not be freed while the process lives. Completions that are left can still be polled. May be called again.
  bool close() noexcept;

  [[nodiscard]] uint32_t in_flight() const noexcept { return in_flight_; }
  [[nodiscard]] uint32_t unsettled() const noexcept { return unsettled_; }
  [[nodiscard]] uint32_t batch_entries() const noexcept { return entries_; }

 private:
  enum class State : uint8_t {
    Empty,       // no handle
    Idle,        // handle, nothing in it
    Running,     // before its deadline
    Cancelling,  // cancelled, within its grace
    Given,       // up: all that hasn't ended is unsettled
  };
  struct Entry {
    uint64_t tag = 0;
    uint64_t bytes = 0;
    bool running = false;
  };
  struct Batch {
    cufile::BatchHandle handle = nullptr;
    State state = State::Empty;
    uint64_t run = 0;                // tells events of this run from those of earlier ones
    uint32_t left = 0;               // entries that haven't ended
    bool clean = true;               // all of this run completed
    Status cause = Status::Timeout;  // of the cancelling
    Clock::time_point until{};       // deadline, then end of the grace
    std::vector<Entry> entries;
  };
  struct Buffer {
    uint64_t address = 0;
    uint64_t bytes = 0;
  };

  [[nodiscard]] const Buffer* buffer_of(const GdsRequest& request) const noexcept;
  Batch* free_batch() noexcept;
  uint32_t fill(Batch& batch, std::span<const GdsRequest> requests) noexcept;
  void start(Batch& batch, uint32_t count, Clock::time_point deadline) noexcept;
  // Ends the batch's running entries with the error of a call that didn't take them.
  void refuse(Batch& batch, int code) noexcept;
  // Takes the events that are there, waiting for one at most `wait`. False: the call failed for good.
  bool take_events(Batch& batch, std::chrono::microseconds wait) noexcept;
  void finish(Batch& batch, const cufile::BatchEvent& event) noexcept;
  // Takes events, then looks whether the run, its deadline or its grace is over.
  void collect(Batch& batch, std::chrono::microseconds wait) noexcept;
  void begin_cancel(Batch& batch, Status cause) noexcept;
  void give_up(Batch& batch) noexcept;
  void destroy(Batch& batch) noexcept;
  void step() noexcept;
  static bool is_used(const Batch& batch) noexcept { return batch.state != State::Empty && batch.state != State::Idle; }
  void push(const GdsCompletion& completion) noexcept;
  [[nodiscard]] size_t room() const noexcept;

  GdsOptions options_;
  std::shared_ptr<cufile::Session> session_;
  std::vector<cufile::Handle> files_;
  std::vector<Buffer> buffers_;  // by address
  std::vector<Batch> batches_;
  uint32_t entries_ = 0;
  uint32_t in_flight_ = 0;  // accepted and not settled
  uint32_t unsettled_ = 0;  // of these, given up
  uint64_t runs_ = 0;
  bool closed_ = false;
  std::vector<cufile::BatchEntry> parameters_;
  std::vector<cufile::BatchEvent> events_;
  std::vector<GdsCompletion> ready_;  // a ring: its size is fixed, room() keeps it from overflowing
  size_t ready_first_ = 0, ready_count_ = 0;
};

}  // namespace tutti
