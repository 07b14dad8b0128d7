#include "tutti/gio/queue.h"

#include <bit>
#include <stdexcept>
#include <thread>

namespace tutti::gio {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("gio queue: " + what); }

}  // namespace

template <typename T>
T* Queue::shared(size_t count) {
  pinned_bytes_ += count * sizeof(T);
  return static_cast<T*>(accelerator_.shared(count * sizeof(T)));
}

template <typename T>
T* Queue::local(size_t count) {
  return static_cast<T*>(accelerator_.local(count * sizeof(T)));
}

template <typename T>
T* Queue::local_copy(std::span<const T> of) {
  auto* const at = local<T>(of.size());
  accelerator_.fill(at, of.data(), of.size_bytes());
  return at;
}

Queue::Queue(Accelerator& accelerator, const QueueOptions& options) : accelerator_(accelerator), options_(options) {
  if (options.depth < 2 || options.depth > 32768) {
    refuse("depth must be 2 to 32768");
  }
  if (options.payload_bytes == 0 || options.payload_bytes > options.object_bytes ||
      options.object_bytes > kLargestObject) {
    refuse("objects of " + std::to_string(options.payload_bytes) + " bytes; one command moves at most " +
           std::to_string(kLargestObject));
  }
  if (!std::has_single_bit(options.logical_block_bytes) || options.logical_block_bytes < 512 ||
      options.object_bytes % options.logical_block_bytes != 0) {
    refuse("objects must be whole logical blocks of a power of two of at least 512 bytes");
  }
  if (options.issuers_per_block == 0 || options.issuers_per_block > kMaxIssuers || options.movers_per_block == 0 ||
      options.issuers_per_block + options.movers_per_block > 32 || options.blocks == 0) {
    refuse("a block has 1 to 8 issuing warps, at least one moving warp, and at most 32 warps in all");
  }
  if (options.lanes == 0 || options.lanes > kLanes || options.pairs_per_issuer == 0 || options.pairs_per_issuer > 32) {
    refuse("1 to 32 commands in flight and 1 to 32 queue pairs per issuing warp");
  }
  make_ring();
  const uint32_t issuers = options.blocks * options.issuers_per_block;
  pairs_ = issuers * options.pairs_per_issuer;
  pair_states_ = shared<uint32_t>(size_t{pairs_} * 32);
  std::vector<IssuerPair> pairs = options.pairs.empty() ? served_pairs() : drive_pairs();
  for (uint32_t pair = 0; pair < pairs_; ++pair) {
    pairs[pair].state = pair_states_ + size_t{pair} * 32;
  }
  auto* local_pairs = local_copy<IssuerPair>(pairs);

  const uint64_t slots = options.bounce ? uint64_t{issuers} * kLanes : 0;
  unsigned char* slot_memory = nullptr;
  if (slots != 0) {
    slot_memory = shared<unsigned char>(slots * options.object_bytes);
    slot_memory_ = {reinterpret_cast<uint64_t>(slot_memory),
                    reinterpret_cast<uint64_t>(slot_memory) + slots * options.object_bytes};
    slot_range_ = local<nvme::P2pRange>(1);
    if (options.pairs.empty()) {
      // One page per issuer: the software controllers see this process's own addresses.
      std::vector<nvme::DataDescriptor> entries;
      for (uint32_t issuer = 0; issuer < issuers; ++issuer) {
        entries.push_back(nvme::sgl(nvme::kSglDataBlock,
                                    slot_memory_.first + uint64_t{issuer} * kLanes * options.object_bytes,
                                    kLanes * options.object_bytes));
      }
      register_slots(
          {slot_memory_.first, local_copy<nvme::DataDescriptor>(entries), 0, issuers, kLanes * options.object_bytes});
    }
  }
  std::vector<IssuerQueues> owned(issuers);
  for (uint32_t issuer = 0; issuer < issuers; ++issuer) {
    owned[issuer].pairs = local_pairs + size_t{issuer} * options.pairs_per_issuer;
    owned[issuer].slots = slots == 0 ? nullptr : slot_memory + uint64_t{issuer} * kLanes * options.object_bytes;
    owned[issuer].slot_range = slot_range_;
  }

  IssueOptions& issue = kernel_.options;
  issue.payload_bytes = options.payload_bytes;
  issue.object_bytes = options.object_bytes;
  issue.block_shift = static_cast<uint32_t>(std::countr_zero(options.logical_block_bytes));
  issue.issuers = issuers;
  issue.pairs_per_issuer = options.pairs_per_issuer;
  issue.lanes = options.lanes;
  issue.bounce = options.bounce;
  issue.command_timeout_ns = options.command_timeout_ns;
  issue.linger_ns = options.linger_ns;
  kernel_.ring = ring_;
  kernel_.issuers = local_copy<IssuerQueues>(owned);
  kernel_.blocks = options.blocks;
  kernel_.issuers_per_block = options.issuers_per_block;
  kernel_.movers_per_block = options.movers_per_block;
}

void Queue::make_ring() {
  ring_.depth = std::bit_ceil(options_.depth);
  iocbs_ = shared<Iocb>(ring_.depth);
  submitted_ = shared<uint32_t>(ring_.depth);
  // Words that different sides write lie in cache lines of their own.
  auto* words = shared<uint32_t>(3 * 32);
  submitted_tail_ = words;
  kernel_.begun = words + 32;
  ring_.iocbs = iocbs_;
  ring_.submitted = submitted_;
  ring_.submitted_tail = submitted_tail_;
  ring_.completions = shared<Cqe>(ring_.depth);
  ring_.completion_ready = shared<uint32_t>(ring_.depth);
  ring_.sums = shared<uint64_t>(size_t{ring_.depth} * kIoctxPerIocb);
  ring_.statuses = shared<uint8_t>(size_t{ring_.depth} * kIoctxPerIocb);
  ring_.cursor = local<uint64_t>(1);
  ring_.done = local<uint32_t>(ring_.depth);
  ring_.first_error = local<uint32_t>(ring_.depth);
  ring_.completion_tail = local<uint32_t>(32);
  ring_.closing = local<uint32_t>(32);
  ring_.unable = local<uint32_t>(32);
  for (uint32_t id = ring_.depth; id > 0; --id) {
    iocbs_[id - 1].header.id = id - 1;
    free_.push_back(id - 1);
  }
}

std::vector<IssuerPair> Queue::drive_pairs() {
  if (options_.pairs.size() != pairs_) {
    refuse(std::to_string(options_.pairs.size()) + " queue pairs were given where the issuing warps have " +
           std::to_string(pairs_));
  }
  std::vector<IssuerPair> pairs;
  for (const auto& given : options_.pairs) {
    if (given.entries != kQueueEntries || given.block_bytes != options_.logical_block_bytes) {
      refuse("a queue pair of a drive has " + std::to_string(kQueueEntries) + " entries, not " +
             std::to_string(given.entries) + ", and all drives have blocks of " +
             std::to_string(options_.logical_block_bytes) + " bytes, not " + std::to_string(given.block_bytes));
    }
    if (options_.object_bytes > given.largest_transfer) {
      refuse("objects of " + std::to_string(options_.object_bytes) +
             " bytes, and a drive whose commands move at most " + std::to_string(given.largest_transfer));
    }
    pairs.push_back({given});
    pairs.back().scratch = local_copy<nvme::ScratchPage>({given.scratch, kLanes});
  }
  return pairs;
}

// Entries of one pair in pages of their own; doorbells a cache line each. A lane has one command in flight, so that the
// pairs of an issuer share its scratch pages.
std::vector<IssuerPair> Queue::served_pairs() {
  auto* sq = shared<nvme::SubmissionEntry>(size_t{pairs_} * kQueueEntries);
  auto* cq = shared<nvme::CompletionEntry>(size_t{pairs_} * kQueueEntries);
  auto* doorbells = shared<uint32_t>(size_t{pairs_} * 64);
  constexpr size_t kWords = nvme::kPrpPageBytes / sizeof(uint64_t);
  const uint32_t issuers = pairs_ / options_.pairs_per_issuer;
  auto* pages = shared<uint64_t>(size_t{issuers} * kLanes * kWords);
  std::vector<nvme::ScratchPage> scratch;
  for (size_t lane = 0; lane < size_t{issuers} * kLanes; ++lane) {
    scratch.push_back({pages + lane * kWords, reinterpret_cast<uint64_t>(pages + lane * kWords)});
  }
  const auto* local_scratch = local_copy<nvme::ScratchPage>(scratch);
  std::vector<IssuerPair> pairs(pairs_);
  for (uint32_t pair = 0; pair < pairs_; ++pair) {
    IssuerPair& queue = pairs[pair];
    queue.sq = sq + size_t{pair} * kQueueEntries;
    queue.cq = cq + size_t{pair} * kQueueEntries;
    queue.sq_doorbell = doorbells + size_t{pair} * 64;
    queue.cq_doorbell = doorbells + size_t{pair} * 64 + 32;
    queue.scratch = local_scratch + size_t{pair / options_.pairs_per_issuer} * kLanes;
    queue.entries = kQueueEntries;
    queue.nsid = 1 + pair % options_.pairs_per_issuer;
    queue.block_bytes = options_.logical_block_bytes;
    queue.largest_transfer = kLargestObject;
    queue.pointer = options_.pointer;
    served_.push_back({queue.sq, queue.cq, queue.sq_doorbell, queue.cq_doorbell, kQueueEntries});
  }
  return pairs;
}

// One command moves one object, and one scratch page describes it.
void Queue::check_describable(const nvme::P2pRange& range) const {
  nvme::DataPointer pointer = options_.pointer;
  for (const auto& pair : options_.pairs) {
    pointer = &pair == options_.pairs.data() || pair.pointer == nvme::DataPointer::Prp ? pair.pointer : pointer;
  }
  const uint64_t most = nvme::largest_described(pointer, range.page_bytes);
  if (options_.object_bytes > most) {
    refuse("objects of " + std::to_string(options_.object_bytes) + " bytes, where a command describes at most " +
           std::to_string(most) + " in pages of " + std::to_string(range.page_bytes));
  }
}

void Queue::register_range(uint64_t base, uint64_t bytes, uint32_t page_bytes,
                           std::span<const uint64_t> page_addresses) {
  if (base % page_bytes != 0 || page_addresses.size() != (bytes + page_bytes - 1) / page_bytes) {
    refuse("a range needs one address per page and begins at a page");
  }
  // Entries in shared memory: the device reads them too, when a command's segment is the table itself.
  auto* entries = shared<nvme::DataDescriptor>(page_addresses.size());
  for (size_t page = 0; page < page_addresses.size(); ++page) {
    entries[page] = nvme::sgl(nvme::kSglDataBlock, page_addresses[page], page_bytes);
  }
  register_range({base, entries, reinterpret_cast<uint64_t>(entries), page_addresses.size(), page_bytes});
}

void Queue::register_range(const nvme::P2pRange& range) {
  check_describable(range);
  ranges_.push_back(range);
  kernel_.options.ranges = local_copy<nvme::P2pRange>(ranges_);
}

void Queue::register_slots(const nvme::P2pRange& range) {
  check_describable(range);
  if (!nvme::inside(range, slot_memory_.first, slot_memory_.second - slot_memory_.first)) {
    refuse("the range doesn't hold all bounce slots");
  }
  accelerator_.fill(slot_range_, &range, sizeof(range));
}

Iocb* Queue::get_iocb() noexcept {
  if (free_.empty()) {
    return nullptr;
  }
  Iocb& iocb = iocbs_[free_.back()];
  free_.pop_back();
  iocb.header.cancelled = 0;
  return &iocb;
}

void Queue::issue(std::span<Iocb* const> iocbs) {
  if (iocbs.empty()) {
    return;
  }
  for (const Iocb* iocb : iocbs) {
    const uint32_t contexts = iocb->header.num_ioctx;
    if (contexts == 0 || contexts > kIoctxPerIocb) {
      refuse("an IOCB has 1 to 2048 contexts");
    }
    store_relaxed(&submitted_[position_ % ring_.depth], iocb->header.id << 16 | contexts);
    ++position_;
    ++outstanding_;
  }
  store_release(submitted_tail_, position_);
  // Either a kernel that is still to begin sees the new tail, or we see that it has begun (both sides write, fence,
  // then read).
  fence_system();
  if (load_acquire(kernel_.begun) == launched_) {
    launch();
  }
}

void Queue::launch() {
  kernel_.number = ++launched_;
  kernel_.options.kernel = launched_;
  accelerator_.launch(kernel_);
}

void Queue::kick() {
  if (outstanding_ != 0 && load_acquire(kernel_.begun) == launched_ && accelerator_.idle()) {
    launch();
  }
}

std::optional<Cqe> Queue::reap() noexcept {
  if (!kept_.empty()) {
    const Cqe cqe = kept_.front();
    kept_.erase(kept_.begin());
    return cqe;
  }
  const uint32_t at = completed_ % ring_.depth;
  if (load_acquire(&ring_.completion_ready[at]) != completed_ + 1) {
    return std::nullopt;
  }
  const Cqe cqe = ring_.completions[at];
  ++completed_;
  --outstanding_;
  return cqe;
}

std::optional<Cqe> Queue::wait_cqe(uint32_t id, std::chrono::nanoseconds timeout) {
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    if (kept->iocb == id) {
      const Cqe cqe = *kept;
      kept_.erase(kept);
      return cqe;
    }
  }
  const auto until = std::chrono::steady_clock::now() + timeout;
  std::vector<Cqe> others;
  std::optional<Cqe> found;
  std::swap(others, kept_);
  for (;;) {
    const auto cqe = reap();
    if (cqe && cqe->iocb == id) {
      found = cqe;
      break;
    }
    if (cqe) {
      others.push_back(*cqe);
      continue;
    }
    if (std::chrono::steady_clock::now() >= until) {
      break;
    }
    kick();
    std::this_thread::yield();
  }
  std::swap(others, kept_);
  return found;
}

void Queue::release(uint32_t id) noexcept {
  ++iocbs_[id].header.generation;
  free_.push_back(id);
}

std::vector<uint32_t> Queue::quarantined() const {
  std::vector<uint32_t> found;
  for (uint32_t pair = 0; pair < pairs_; ++pair) {
    if (load_acquire(pair_states_ + size_t{pair} * 32) == static_cast<uint32_t>(PairState::Quarantine)) {
      found.push_back(pair);
    }
  }
  return found;
}

void Queue::retire(uint32_t pair) noexcept {
  store_release(pair_states_ + size_t{pair} * 32, static_cast<uint32_t>(PairState::Retired));
}

uint32_t Queue::working_pairs() const noexcept {
  uint32_t working = 0;
  for (size_t pair = 0; pair < pairs_; ++pair) {
    working += load_acquire(pair_states_ + pair * 32) == static_cast<uint32_t>(PairState::Working) ? 1 : 0;
  }
  return working;
}

}  // namespace tutti::gio
