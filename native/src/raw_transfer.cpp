#include "tutti/raw_transfer.h"

#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "tutti/uring.h"

namespace tutti {
namespace {

// Moves every `stride`-th range from `first` on. Returns 0 or a negative errno.
int run_ring(Uring& ring, std::span<const RawRange> ranges, uint64_t bytes, bool write, uint32_t first, uint32_t stride,
             uint32_t depth) {
  size_t next = first;
  uint32_t in_flight = 0;
  int failure = 0;
  while (next < ranges.size() || in_flight != 0) {
    uint32_t batch = 0;
    for (; next < ranges.size() && in_flight < depth && batch < 4; next += stride, ++in_flight, ++batch) {
      io_uring_sqe* sqe = ring.get_sqe();
      sqe->opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
      sqe->fd = ranges[next].fd;
      sqe->off = ranges[next].offset;
      sqe->addr = ranges[next].address;
      sqe->len = static_cast<uint32_t>(bytes);
    }
    const bool full = in_flight == depth || next >= ranges.size();
    ring.submit(full ? 1 : 0, 1'000'000'000);
    ring.reap([&](uint64_t, int64_t result) {
      --in_flight;
      if (result != static_cast<int64_t>(bytes)) {
        failure = result < 0 ? static_cast<int>(result) : -EIO;
      }
    });
  }
  return failure;
}

}  // namespace

double raw_transfer(std::span<const RawRange> ranges, uint64_t bytes, bool write, uint32_t threads, uint32_t depth) {
  std::vector<std::unique_ptr<Uring>> rings;
  for (uint32_t i = 0; i < threads; ++i) {
    rings.push_back(std::make_unique<Uring>(depth));
  }
  std::atomic<int> failure{0};
  std::barrier start(threads + 1);
  std::vector<std::jthread> workers;
  for (uint32_t i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] {
      start.arrive_and_wait();
      if (const int result = run_ring(*rings[i], ranges, bytes, write, i, threads, depth); result != 0) {
        failure = result;
      }
    });
  }
  start.arrive_and_wait();
  const auto begin = std::chrono::steady_clock::now();
  workers.clear();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  if (failure != 0) {
    throw std::system_error(-failure, std::generic_category(), "raw transfer");
  }
  return took.count();
}

}  // namespace tutti
