// The ring under threads: every IOCTX is taken exactly once, generations grow, nothing is lost when the ring is full.
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "tutti/ring.h"

using namespace tutti;

int main() {
  constexpr uint32_t kDepth = 4;
  constexpr uint32_t kIocbs = 20000;
  constexpr uint32_t kWorkers = 3;
  Ring ring(kDepth);
  std::vector<std::atomic<uint32_t>> seen(kIocbs);
  std::atomic<uint32_t> issued{0};
  std::atomic<uint32_t> reaped{0};
  std::atomic<uint32_t> errors{0};

  // A full ring says so.
  std::vector<Iocb*> all;
  while (Iocb* iocb = ring.get_iocb()) {
    all.push_back(iocb);
  }
  CHECK(all.size() == kDepth);
  for (Iocb* iocb : all) {
    iocb->header.num_ioctx = 1;
    ring.issue(*iocb);
    CHECK(ring.take() == iocb);
    CHECK(ring.complete(*iocb, 0, Status::Ok));
    const auto cqe = ring.reap();
    CHECK(cqe && cqe->iocb == iocb->header.id && cqe->generation == 0 && cqe->status == 0);
    CHECK(iocb->header.generation == 1);
  }

  std::vector<std::thread> threads;
  threads.emplace_back([&] {  // planner: fills, issues, reaps
    while (reaped.load() < kIocbs) {
      while (const auto cqe = ring.reap()) {
        errors += cqe->status == static_cast<uint32_t>(Status::DeviceError) ? 1 : 0;
        ++reaped;
      }
      if (issued.load() < kIocbs) {
        if (Iocb* iocb = ring.get_iocb()) {
          iocb->header.first_item = issued++;
          iocb->header.num_ioctx = static_cast<uint16_t>(1 + iocb->header.first_item % 5);
          ring.issue(*iocb);
        }
      }
    }
  });
  for (uint32_t worker = 0; worker < kWorkers; ++worker) {
    threads.emplace_back([&] {
      while (reaped.load() < kIocbs) {
        Iocb* iocb = ring.take();
        if (iocb == nullptr) {
          std::this_thread::yield();
          continue;
        }
        const uint64_t item = iocb->header.first_item;
        const uint16_t contexts = iocb->header.num_ioctx;
        for (uint16_t i = 0; i < contexts; ++i) {
          ++seen[item];
          ring.complete(*iocb, i, item % 10 == 0 && i == 0 ? Status::DeviceError : Status::Ok);
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (uint32_t item = 0; item < kIocbs; ++item) {
    CHECK(seen[item].load() == 1 + item % 5);
  }
  CHECK(errors.load() == kIocbs / 10);
  return 0;
}
