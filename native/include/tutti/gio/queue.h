// gio_uring: the ring of IOCBs, the queue pairs of the I/O kernel, and the kernel's launches, as their user sees them.
//
// get_iocb() -> fill contexts -> issue() -> wait_cqe() or reap(). Several IOCBs may go out with one launch; a kernel
// that is running takes what is issued meanwhile, so launches don't wait for each other. Invariants: whatever was
// issued is seen by a kernel that is running or will run (a launch follows unless one is still to begin); an IOCB is
// freed only by release(), under a new generation. Not thread-safe: one thread drives it; controllers and kernel work
// beside it. Source: Tutti (arXiv 2605.03375), GPU io_uring.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tutti/gio/accelerator.h"
#include "tutti/nvme/queue_server.h"

namespace tutti::gio {

struct QueueOptions {
  uint32_t depth = 32;  // IOCBs; rounded up to a power of two
  uint32_t blocks = 8;  // thread blocks of the I/O kernel: at most one per multiprocessor of its domain
  uint32_t issuers_per_block = 2;
  uint32_t movers_per_block = 30;
  uint32_t lanes = kLanes;
  uint32_t pairs_per_issuer = 1;
  uint32_t payload_bytes = 0;
  uint32_t object_bytes = 0;
  uint32_t logical_block_bytes = 512;
  bool bounce = true;
  // Queue pairs of drives, one per device for each issuer in turn: issuers * pairs_per_issuer. Their memory outlives
  // the last kernel. Empty: pairs are made here, for software controllers, with `pointer` and namespace device + 1.
  std::vector<nvme::QueuePair> pairs;
  nvme::DataPointer pointer = nvme::DataPointer::Sgl;
  uint64_t command_timeout_ns = 30'000'000'000;
  uint64_t linger_ns = 50'000;
};

class Queue {
 public:
  // `accelerator` outlives the queue. Throws std::invalid_argument for options that can't work and std::runtime_error
  // when memory can't be had.
  Queue(Accelerator& accelerator, const QueueOptions& options);

  // Registered ranges for options.bounce == false, before the first launch: one entry per page. The entries of the
  // second form stay the caller's, where the drive can read them.
  void register_range(uint64_t base, uint64_t bytes, uint32_t page_bytes, std::span<const uint64_t> page_addresses);
  void register_range(const nvme::P2pRange& range);
  // Where drives see slot_memory(), for options.bounce == true, before the first launch. Software controllers need
  // none.
  void register_slots(const nvme::P2pRange& range);

  // A free IOCB to fill, or nullptr (EAGAIN).
  Iocb* get_iocb() noexcept;
  // Hands filled IOCBs over (num_ioctx > 0 each), and launches the kernel where it must.
  void issue(std::span<Iocb* const> iocbs);
  // The next completion, in order of completion. Its IOCB stays the caller's until release().
  std::optional<Cqe> reap() noexcept;
  // Waits for one IOCB; other completions are kept for reap(). Empty when the time is over.
  std::optional<Cqe> wait_cqe(uint32_t id, std::chrono::nanoseconds timeout);
  void release(uint32_t id) noexcept;
  // Launches again if something is outstanding and no kernel runs. To be called while waiting.
  void kick();

  // Sums that reads must have, or that writes had; statuses of the contexts (0 = Ok), to be zeroed by their reader.
  [[nodiscard]] uint64_t* sums(uint32_t id) const noexcept { return ring_.sums + uint64_t{id} * kIoctxPerIocb; }
  [[nodiscard]] uint8_t* statuses(uint32_t id) const noexcept { return ring_.statuses + uint64_t{id} * kIoctxPerIocb; }
  [[nodiscard]] uint32_t outstanding() const noexcept { return outstanding_; }
  [[nodiscard]] uint32_t launches() const noexcept { return launched_; }
  [[nodiscard]] uint32_t depth() const noexcept { return ring_.depth; }

  // Pairs of issuer i are [i * pairs_per_issuer, (i + 1) * pairs_per_issuer).
  [[nodiscard]] uint32_t pairs() const noexcept { return pairs_; }
  // What software controllers serve; empty for pairs of drives.
  [[nodiscard]] const std::vector<nvme::ServedQueue>& served() const noexcept { return served_; }
  // Pairs whose issuer waits for the host's word that no device can touch the commands' memory any more.
  [[nodiscard]] std::vector<uint32_t> quarantined() const;
  // That word, for a quarantined pair or any other: its commands end, and it takes none again.
  void retire(uint32_t pair) noexcept;
  [[nodiscard]] uint32_t working_pairs() const noexcept;

  // All bounce slots, first and end, whole pages of 4 KiB: for registration with a kernel or a device.
  [[nodiscard]] std::pair<uint64_t, uint64_t> slot_memory() const noexcept { return slot_memory_; }
  [[nodiscard]] uint64_t pinned_bytes() const noexcept { return pinned_bytes_; }

 private:
  template <typename T>
  T* shared(size_t count);
  template <typename T>
  T* local(size_t count);
  template <typename T>
  T* local_copy(std::span<const T> of);
  void make_ring();
  std::vector<IssuerPair> drive_pairs();
  std::vector<IssuerPair> served_pairs();
  void check_describable(const nvme::P2pRange& range) const;
  void launch();

  Accelerator& accelerator_;
  const QueueOptions options_;
  RingView ring_;
  KernelArguments kernel_;
  Iocb* iocbs_ = nullptr;
  uint32_t* submitted_ = nullptr;
  uint32_t* submitted_tail_ = nullptr;
  uint32_t* pair_states_ = nullptr;
  std::vector<nvme::ServedQueue> served_;
  std::vector<nvme::P2pRange> ranges_;
  nvme::P2pRange* slot_range_ = nullptr;
  std::pair<uint64_t, uint64_t> slot_memory_{0, 0};
  uint32_t pairs_ = 0;
  std::vector<uint32_t> free_;
  std::vector<Cqe> kept_;  // reaped by wait_cqe for others
  uint32_t position_ = 0;  // next to submit
  uint32_t completed_ = 0;
  uint32_t outstanding_ = 0;
  uint32_t launched_ = 0;
  uint64_t pinned_bytes_ = 0;
};

}  // namespace tutti::gio
