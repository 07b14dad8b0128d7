// A lane that drives one io_uring. Up to queue_depth objects in flight; submission batches of about kRunBytes: large
// enough that the kernel can merge neighbours into one command, small enough that an object which the processor copied
// is still in its cache when the checksum is taken.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "tutti/lane_executor.h"
#include "tutti/uring.h"

namespace tutti {
namespace {

constexpr uint64_t kLargestBatch = 16;
constexpr uint64_t kTickNs = 5'000'000;  // how often deadlines are looked at while I/O is in flight
constexpr uint64_t kCancelTag = uint64_t{1} << 63;
constexpr uint32_t kRetries = 64;

class Lane {
 public:
  explicit Lane(LaneExecutor& executor)
      : executor_(executor),
        depth_(executor.options().queue_depth),
        batch_(static_cast<uint32_t>(std::clamp<uint64_t>(kRunBytes / executor.io_bytes(), 1, kLargestBatch))),
        ring_(2 * depth_),  // room for a cancel beside each operation
        transfers_(depth_),
        running_(depth_, false),
        cancelled_(depth_, false),
        hung_(depth_, false),
        staging_bytes_(depth_ * executor.io_bytes()) {
    void* at = mmap(nullptr, staging_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(), "staging memory");
    }
    staging_ = static_cast<unsigned char*>(at);
    std::vector<int> files;
    for (const auto& device : executor.devices()) {
      files.push_back(device.fd);
    }
    fixed_files_ = ring_.register_files(files) >= 0;
    if (executor.options().register_buffers && !executor.ranges().empty()) {
      const int result = ring_.register_buffers(executor.ranges());
      fixed_buffers_ = result >= 0;
      if (!fixed_buffers_) {
        executor.note(std::string("buffers not registered: ") + std::strerror(-result) +
                      (result == -ENOMEM ? " (raise the locked-memory limit: ulimit -l)" : ""));
      }
    }
    for (uint32_t id = depth_; id > 0; --id) {
      free_.push_back(id - 1);
    }
  }

  ~Lane() { munmap(staging_, staging_bytes_); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void run() {
    for (;;) {
      const uint64_t seen = executor_.epoch();
      const bool more = start_some();
      reap();
      if (in_flight() == 0 && !more) {
        if (executor_.stopping()) {
          return;  // every plan is over, and start_some() has just found the ring empty
        }
        executor_.expire_plans();
        executor_.wait_for_work(seen);
        continue;
      }
      const bool must_wait = free_.empty() || !more;
      if (ring_.unsubmitted() != 0 || must_wait) {
        const bool kernel_has_some = in_flight() > hanging_;
        // When all are in flight, a batch of completions makes room for a batch of neighbours.
        const uint32_t enough = free_.empty() ? std::min(batch_, in_flight() - hanging_) : 1;
        ring_.submit(must_wait && kernel_has_some ? enough : 0, kTickNs);
        if (must_wait && !kernel_has_some) {
          executor_.wait_for_work(seen);
        }
      }
      reap();
      if (Clock::now() >= next_check_) {
        executor_.expire_plans();
        cancel_ended();
        next_check_ = Clock::now() + std::chrono::nanoseconds(kTickNs);
      }
    }
  }

 private:
  [[nodiscard]] uint32_t in_flight() const noexcept { return depth_ - static_cast<uint32_t>(free_.size()); }

  // Prepares up to a batch of operations. False when there is nothing more to start.
  bool start_some() {
    while (!free_.empty() && ring_.unsubmitted() < batch_) {
      if (iocb_ == nullptr) {
        iocb_ = executor_.next_iocb();
        next_context_ = 0;
        if (iocb_ == nullptr) {
          return false;
        }
      }
      // The IOCB may be reused as soon as its last context has ended, so look at its length before.
      const bool last = next_context_ + 1U == iocb_->header.num_ioctx;
      Iocb& iocb = *iocb_;
      const auto context = next_context_++;
      if (last) {
        iocb_ = nullptr;
      }
      const uint32_t id = free_.back();
      LaneExecutor::Transfer& transfer = transfers_[id];
      if (executor_.begin(iocb, context, staging_ + id * executor_.io_bytes(), transfer)) {
        free_.pop_back();
        running_[id] = true;
        cancelled_[id] = false;
        issue(id);
      }
    }
    return true;
  }

  void issue(uint32_t id) {
    LaneExecutor::Transfer& transfer = transfers_[id];
    if (transfer.fault.kind == FaultKind::Hang) {
      hung_[id] = true;
      hung_since_ = executor_.faults()->releases();
      ++hanging_;
      return;
    }
    io_uring_sqe* sqe = ring_.get_sqe();
    while (sqe == nullptr) {
      ring_.submit(0, 0);
      sqe = ring_.get_sqe();
    }
    const bool write = transfer.iocb->header.direction == Direction::Write;
    const bool fixed = fixed_buffers_ && transfer.registered != kNoBuffer;
    sqe->opcode = static_cast<uint8_t>(fixed ? (write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED)
                                             : (write ? IORING_OP_WRITE : IORING_OP_READ));
    if (fixed) {
      sqe->buf_index = static_cast<uint16_t>(transfer.registered);
    }
    if (fixed_files_) {
      sqe->flags = IOSQE_FIXED_FILE;
      sqe->fd = static_cast<int32_t>(transfer.device);
    } else {
      sqe->fd = executor_.devices()[transfer.device].fd;
    }
    sqe->addr = reinterpret_cast<uint64_t>(transfer.buffer);
    const bool half = transfer.fault.kind == FaultKind::Error || transfer.fault.kind == FaultKind::Short;
    sqe->len = static_cast<uint32_t>(half ? executor_.io_bytes() / 2 / kLbaBytes * kLbaBytes : executor_.io_bytes());
    sqe->off = transfer.offset;
    sqe->user_data = id;
  }

  void reap() {
    ring_.reap([this](uint64_t tag, int64_t result) {
      if ((tag & kCancelTag) != 0) {
        return;  // what was cancelled ends by its own completion
      }
      const auto id = static_cast<uint32_t>(tag);
      if ((result == -EAGAIN || result == -EINTR) && !cancelled_[id] && transfers_[id].retries++ < kRetries) {
        issue(id);
        return;
      }
      end(id, result);
    });
    if (hanging_ != 0 && executor_.faults()->releases() != hung_since_) {
      for (uint32_t id = 0; id < depth_; ++id) {
        if (hung_[id]) {
          hung_[id] = false;
          --hanging_;
          end(id, -ECANCELED);
        }
      }
    }
  }

  void end(uint32_t id, int64_t result) {
    executor_.finish(transfers_[id], result);
    running_[id] = false;
    free_.push_back(id);
  }

  // Asks the kernel to give up operations whose plan is over; they end when the kernel says so.
  void cancel_ended() {
    for (uint32_t id = 0; id < depth_; ++id) {
      if (!running_[id] || hung_[id] || cancelled_[id] ||
          !reinterpret_cast<Plan*>(transfers_[id].iocb->header.plan)->ended_early()) {
        continue;
      }
      io_uring_sqe* sqe = ring_.get_sqe();
      if (sqe == nullptr) {
        return;
      }
      cancelled_[id] = true;
      sqe->opcode = IORING_OP_ASYNC_CANCEL;
      sqe->fd = -1;
      sqe->addr = id;
      sqe->user_data = kCancelTag | id;
    }
  }

  LaneExecutor& executor_;
  const uint32_t depth_;
  const uint32_t batch_;  // operations prepared before the kernel is told
  Uring ring_;
  std::vector<LaneExecutor::Transfer> transfers_;
  std::vector<bool> running_, cancelled_, hung_;
  std::vector<uint32_t> free_;
  uint64_t staging_bytes_;
  unsigned char* staging_ = nullptr;
  Iocb* iocb_ = nullptr;
  uint16_t next_context_ = 0;
  bool fixed_files_ = false;
  bool fixed_buffers_ = false;
  uint32_t hanging_ = 0;
  uint64_t hung_since_ = 0;
  Clock::time_point next_check_ = Clock::now();
};

}  // namespace

void run_uring_lane(LaneExecutor& executor, const std::function<void()>& ready) {
  Lane lane(executor);
  ready();
  lane.run();
}

}  // namespace tutti
