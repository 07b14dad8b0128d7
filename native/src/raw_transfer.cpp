#include "tutti/raw_transfer.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "tutti/uring.h"

namespace tutti {
namespace {

using Memory = std::vector<std::pair<uint64_t, uint64_t>>;

double processor_seconds() noexcept {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Moves the batches that no other thread has taken. Returns 0 or a negative errno.
int run_ring(Uring& ring, std::span<const RawRange> ranges, uint64_t bytes, bool write, std::atomic<size_t>& taken,
             uint32_t depth, const Memory& memory) {
  size_t next = 0;
  size_t end = 0;
  uint32_t in_flight = 0;
  int failure = 0;
  for (;;) {
    if (next == end) {
      next = std::min(taken.fetch_add(kRawBatch), ranges.size());
      end = std::min(next + kRawBatch, ranges.size());
    }
    const bool last = next == end;
    if (last && in_flight == 0) {
      return failure;
    }
    for (; next < end && in_flight < depth; ++next, ++in_flight) {
      io_uring_sqe* sqe = ring.get_sqe();
      const uint64_t address = ranges[next].address;
      const auto after = std::upper_bound(memory.begin(), memory.end(), std::make_pair(address, UINT64_MAX));
      const bool fixed = after != memory.begin() && address + bytes <= std::prev(after)->second;
      sqe->opcode =
          fixed ? (write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED) : (write ? IORING_OP_WRITE : IORING_OP_READ);
      if (fixed) {
        sqe->buf_index = static_cast<uint16_t>(std::prev(after) - memory.begin());
      }
      sqe->fd = ranges[next].fd;
      sqe->off = ranges[next].offset;
      sqe->addr = address;
      sqe->len = static_cast<uint32_t>(bytes);
    }
    ring.submit(in_flight == depth || last ? 1 : 0, 1'000'000'000);
    ring.reap([&](uint64_t, int64_t result) {
      --in_flight;
      if (result != static_cast<int64_t>(bytes)) {
        failure = result < 0 ? static_cast<int>(result) : -EIO;
      }
    });
  }
}

// The same by plain calls, one range at a time: what is fastest on files in memory.
int run_plain(std::span<const RawRange> ranges, uint64_t bytes, bool write, std::atomic<size_t>& taken) {
  for (;;) {
    const size_t first = std::min(taken.fetch_add(kRawBatch), ranges.size());
    const size_t end = std::min(first + kRawBatch, ranges.size());
    if (first == end) {
      return 0;
    }
    for (size_t i = first; i < end; ++i) {
      auto* address = reinterpret_cast<void*>(ranges[i].address);
      const auto offset = static_cast<off_t>(ranges[i].offset);
      const ssize_t result =
          write ? pwrite(ranges[i].fd, address, bytes, offset) : pread(ranges[i].fd, address, bytes, offset);
      if (result != static_cast<ssize_t>(bytes)) {
        return result < 0 ? -errno : -EIO;
      }
    }
  }
}

}  // namespace

RawSeconds raw_transfer(std::span<const RawRange> ranges, uint64_t bytes, bool write, uint32_t threads, uint32_t depth,
                        const Memory& memory) {
  std::atomic<int> failure{0};
  std::atomic<size_t> taken{0};
  std::barrier start(threads + 1);
  std::vector<std::jthread> workers;
  for (uint32_t i = 0; i < threads; ++i) {
    workers.emplace_back([&] {
      std::unique_ptr<Uring> ring;  // belongs to the thread that makes it
      int result = 0;
      try {
        if (depth != 0) {
          ring = std::make_unique<Uring>(depth);
          result = memory.empty() ? 0 : ring->register_buffers(memory);
        }
      } catch (const std::system_error& error) {
        result = -error.code().value();
      }
      start.arrive_and_wait();
      if (result >= 0) {
        result = ring == nullptr ? run_plain(ranges, bytes, write, taken)
                                 : run_ring(*ring, ranges, bytes, write, taken, depth, memory);
      }
      if (result < 0) {
        failure = result;
      }
    });
  }
  start.arrive_and_wait();
  const double processor = processor_seconds();
  const auto begin = std::chrono::steady_clock::now();
  workers.clear();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  if (failure != 0) {
    throw std::system_error(-failure, std::generic_category(), "raw transfer");
  }
  return {took.count(), processor_seconds() - processor};
}

}  // namespace tutti
