#include "tutti/raw_transfer.h"

#include <algorithm>
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

using Memory = std::vector<std::pair<uint64_t, uint64_t>>;

// Moves every `stride`-th range from `first` on. Returns 0 or a negative errno.
int run_ring(Uring& ring, std::span<const RawRange> ranges, uint64_t bytes, bool write, uint32_t first, uint32_t stride,
             uint32_t depth, const Memory& memory) {
  size_t next = first;
  uint32_t in_flight = 0;
  int failure = 0;
  while (next < ranges.size() || in_flight != 0) {
    uint32_t batch = 0;
    for (; next < ranges.size() && in_flight < depth && batch < 4; next += stride, ++in_flight, ++batch) {
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

double raw_transfer(std::span<const RawRange> ranges, uint64_t bytes, bool write, uint32_t threads, uint32_t depth,
                    const Memory& memory) {
  std::vector<std::unique_ptr<Uring>> rings;
  for (uint32_t i = 0; i < threads; ++i) {
    rings.push_back(std::make_unique<Uring>(depth));
    if (const int result = memory.empty() ? 0 : rings.back()->register_buffers(memory); result < 0) {
      throw std::system_error(-result, std::generic_category(), "registering the memory of a raw transfer");
    }
  }
  std::atomic<int> failure{0};
  std::barrier start(threads + 1);
  std::vector<std::jthread> workers;
  for (uint32_t i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] {
      start.arrive_and_wait();
      if (const int result = run_ring(*rings[i], ranges, bytes, write, i, threads, depth, memory); result != 0) {
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
