// A lane of the thread-pool executor: one object at a time by preadv2/pwritev2.
#include <sys/mman.h>
#include <sys/uio.h>

#include <cerrno>
#include <system_error>

#include "tutti/lane_executor.h"

namespace tutti {
namespace {

constexpr uint32_t kRetries = 64;

int64_t move_once(const LaneExecutor& executor, const LaneExecutor::Transfer& transfer) noexcept {
  const bool half = transfer.fault.kind == FaultKind::Error || transfer.fault.kind == FaultKind::Short;
  const uint64_t bytes = half ? executor.io_bytes() / 2 / kLbaBytes * kLbaBytes : executor.io_bytes();
  const iovec vector{transfer.buffer, bytes};
  const int fd = executor.devices()[transfer.device].fd;
  const auto offset = static_cast<off_t>(transfer.offset);
  const bool write = transfer.iocb->header.direction == Direction::Write;
  for (uint32_t attempt = 0;; ++attempt) {
    const ssize_t result = write ? pwritev2(fd, &vector, 1, offset, 0) : preadv2(fd, &vector, 1, offset, 0);
    if (result >= 0) {
      return result;
    }
    if ((errno != EAGAIN && errno != EINTR) || attempt >= kRetries) {
      return -errno;
    }
  }
}

class Staging {
 public:
  explicit Staging(uint64_t bytes)
      : bytes_(bytes), at_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (at_ == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(), "staging memory");
    }
  }
  ~Staging() { munmap(at_, bytes_); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  [[nodiscard]] unsigned char* data() const noexcept { return static_cast<unsigned char*>(at_); }

 private:
  uint64_t bytes_;
  void* at_;
};

}  // namespace

void run_posix_lane(LaneExecutor& executor, const std::function<void()>& ready) {
  const Staging staging(executor.io_bytes());
  ready();
  LaneExecutor::Transfer transfer;
  for (;;) {
    const uint64_t seen = executor.epoch();
    Iocb* iocb = executor.next_iocb();
    if (iocb == nullptr) {
      if (executor.stopping()) {
        return;
      }
      executor.expire_plans();
      executor.wait_for_work(seen);
      continue;
    }
    const uint32_t contexts = iocb->header.num_ioctx;  // the IOCB may be reused once its last context has ended
    for (uint32_t context = 0; context < contexts; ++context) {
      if (!executor.begin(*iocb, static_cast<uint16_t>(context), staging.data(), transfer)) {
        continue;
      }
      int64_t result = -ECANCELED;
      if (transfer.fault.kind == FaultKind::Hang) {
        executor.hang_until_released();
      } else {
        result = move_once(executor, transfer);
      }
      executor.finish(transfer, result);
    }
  }
}

}  // namespace tutti
