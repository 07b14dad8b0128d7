#include "tutti/uring.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/stat.h>
#include <linux/time_types.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "tutti/lane_executor.h"

namespace tutti {
namespace {

void* map_ring(int fd, uint64_t bytes, uint64_t what) noexcept {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(what));
  return at == MAP_FAILED ? nullptr : at;
}

int sys_register(int fd, unsigned what, const void* arguments, unsigned count) noexcept {
  const auto result = syscall(__NR_io_uring_register, fd, what, arguments, count);
  return result < 0 ? -errno : static_cast<int>(result);
}

}  // namespace

Uring::Uring(uint32_t entries) {
  io_uring_params params{};
  // The thread that made the ring is the only one that uses it: completions are then posted when it asks for them,
  // without interrupting it. Kernels before 6.1 don't know that.
  params.flags = IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
  if (fd_ < 0 && errno == EINVAL) {
    params = io_uring_params{};
    params.flags = IORING_SETUP_CLAMP;
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
  }
  if (fd_ < 0) {
    throw std::system_error(errno, std::generic_category(), "io_uring_setup");
  }
  sq_map_bytes_ = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
  cq_map_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  sqe_map_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  sq_map_ = map_ring(fd_, sq_map_bytes_, IORING_OFF_SQ_RING);
  cq_map_ = map_ring(fd_, cq_map_bytes_, IORING_OFF_CQ_RING);
  sqe_map_ = map_ring(fd_, sqe_map_bytes_, IORING_OFF_SQES);
  if (sq_map_ == nullptr || cq_map_ == nullptr || sqe_map_ == nullptr || (params.features & IORING_FEAT_EXT_ARG) == 0) {
    const int error = sqe_map_ == nullptr ? errno : EOPNOTSUPP;
    unmap();
    throw std::system_error(error, std::generic_category(), "io_uring ring memory or timed waits");
  }
  auto* sq = static_cast<unsigned char*>(sq_map_);
  auto* cq = static_cast<unsigned char*>(cq_map_);
  sq_head_ = reinterpret_cast<uint32_t*>(sq + params.sq_off.head);
  sq_tail_ = reinterpret_cast<uint32_t*>(sq + params.sq_off.tail);
  sq_array_ = reinterpret_cast<uint32_t*>(sq + params.sq_off.array);
  sq_mask_ = *reinterpret_cast<uint32_t*>(sq + params.sq_off.ring_mask);
  cq_head_ = reinterpret_cast<uint32_t*>(cq + params.cq_off.head);
  cq_tail_ = reinterpret_cast<uint32_t*>(cq + params.cq_off.tail);
  cq_mask_ = *reinterpret_cast<uint32_t*>(cq + params.cq_off.ring_mask);
  cqes_ = reinterpret_cast<io_uring_cqe*>(cq + params.cq_off.cqes);
  sqes_ = static_cast<io_uring_sqe*>(sqe_map_);
  sq_entries_ = params.sq_entries;
}

Uring::~Uring() { unmap(); }

void Uring::unmap() noexcept {
  const auto drop = [](void* at, uint64_t bytes) {
    if (at != nullptr) {
      munmap(at, bytes);
    }
  };
  drop(sq_map_, sq_map_bytes_);
  drop(cq_map_, cq_map_bytes_);
  drop(sqe_map_, sqe_map_bytes_);
  if (fd_ >= 0) {
    close(fd_);
  }
}

int Uring::register_files(const std::vector<int>& fds) noexcept {
  return sys_register(fd_, IORING_REGISTER_FILES, fds.data(), static_cast<unsigned>(fds.size()));
}

int Uring::register_buffers(const std::vector<std::pair<uint64_t, uint64_t>>& ranges) noexcept {
  std::vector<iovec> vectors;
  vectors.reserve(ranges.size());
  for (const auto& [first, last] : ranges) {
    vectors.push_back({reinterpret_cast<void*>(first), last - first});
  }
  return sys_register(fd_, IORING_REGISTER_BUFFERS, vectors.data(), static_cast<unsigned>(vectors.size()));
}

io_uring_sqe* Uring::get_sqe() noexcept {
  const uint32_t tail = *sq_tail_;
  if (tail - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE) >= sq_entries_) {
    return nullptr;
  }
  io_uring_sqe* sqe = &sqes_[tail & sq_mask_];
  std::memset(sqe, 0, sizeof(*sqe));
  sq_array_[tail & sq_mask_] = tail & sq_mask_;
  __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);  // not polled by the kernel: read only inside submit()
  ++pending_;
  return sqe;
}

int Uring::submit(uint32_t wait_for, uint64_t timeout_ns) noexcept {
  __kernel_timespec timeout{.tv_sec = static_cast<int64_t>(timeout_ns / 1000000000),
                            .tv_nsec = static_cast<long long>(timeout_ns % 1000000000)};
  io_uring_getevents_arg argument{};
  argument.ts = reinterpret_cast<uint64_t>(&timeout);
  const unsigned flags = wait_for != 0 ? IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG : 0;
  const auto result = syscall(__NR_io_uring_enter, fd_, pending_, wait_for, flags, wait_for != 0 ? &argument : nullptr,
                              wait_for != 0 ? sizeof(argument) : 0);
  if (result < 0) {
    // A wait that timed out may still have submitted: the ring's head tells.
    const int error = errno;
    pending_ = *sq_tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
    return -error;
  }
  pending_ -= static_cast<uint32_t>(result);
  return static_cast<int>(result);
}

std::string probe_uring() {
  try {
    Uring ring(4);
    io_uring_sqe* sqe = ring.get_sqe();
    sqe->opcode = IORING_OP_NOP;
    sqe->user_data = 42;
    if (const int result = ring.submit(1, 1000000000); result < 0) {
      return std::string("io_uring_enter: ") + std::strerror(-result);
    }
    bool seen = false;
    ring.reap([&](uint64_t data, int64_t) { seen = data == 42; });
    return seen ? "" : "io_uring accepted an operation and never completed it";
  } catch (const std::system_error& error) {
    std::string why = error.what();
    if (error.code().value() == EPERM) {
      why += " (a seccomp profile or kernel.io_uring_disabled refuses io_uring)";
    } else if (error.code().value() == ENOSYS) {
      why += " (this kernel has no io_uring)";
    }
    return why;
  }
}

std::pair<uint32_t, uint32_t> direct_io_alignment(int fd) {
  struct statx status{};
#ifdef STATX_DIOALIGN
  if (syscall(__NR_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0 && status.stx_dio_offset_align != 0) {
    return {status.stx_dio_mem_align, status.stx_dio_offset_align};
  }
#endif
  struct statfs system{};
  if (fstatfs(fd, &system) == 0 && system.f_type == TMPFS_MAGIC) {
    return {1, 1};  // copied by the CPU: takes any address
  }
  return {0, 0};
}

}  // namespace tutti
