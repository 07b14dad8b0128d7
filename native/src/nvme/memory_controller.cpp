#include "tutti/nvme/memory_controller.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>

#include "tutti/executor.h"

namespace tutti::nvme {
namespace {

constexpr uint32_t kCommandsAtOnce = 256;  // of one thread
constexpr uint32_t kSpins = 20000;
constexpr std::chrono::milliseconds kLongestSleep{100};  // then a look at the queues to abort
constexpr uint8_t kAbortAsked = 1;
constexpr uint8_t kAborted = 2;

uint64_t now_ns() noexcept {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

class HostCopyEngine : public CopyEngine {
 public:
  bool begin(uint32_t tag, const std::vector<CopyPart>& parts) override {
    for (const auto& part : parts) {
      std::memcpy(reinterpret_cast<void*>(part.target), reinterpret_cast<const void*>(part.source), part.bytes);
    }
    ended_.push_back(tag);
    return true;
  }
  uint32_t poll() override {
    if (ended_.empty()) {
      return UINT32_MAX;
    }
    const uint32_t tag = ended_.front();
    ended_.pop_front();
    return tag;
  }

 private:
  std::deque<uint32_t> ended_;
};

}  // namespace

std::unique_ptr<CopyEngine> make_host_copy_engine() { return std::make_unique<HostCopyEngine>(); }

class MemoryController::Lane {
 public:
  Lane(MemoryController& owner, uint32_t thread) : owner_(owner), options_(owner.options_) {
    for (uint32_t i = thread; i < owner.queues_.size(); i += options_.threads) {
      server_.add(owner.queues_[i]);
      numbers_.push_back(i);
    }
    if (thread < options_.engines.size()) {
      engine_ = options_.engines[thread].get();
    } else {
      own_ = make_host_copy_engine();
      engine_ = own_.get();
    }
    commands_.resize(kCommandsAtOnce);
    for (uint32_t id = kCommandsAtOnce; id > 0; --id) {
      free_.push_back(id - 1);
    }
  }

  // Looks once. Returns whether there was anything.
  bool turn() {
    bool any = take();
    for (uint32_t tag = engine_->poll(); tag != UINT32_MAX; tag = engine_->poll()) {
      any = true;
      moved(tag);
    }
    any |= complete_held();
    answer_aborts();
    return any;
  }
  [[nodiscard]] bool idle() const noexcept { return free_.size() == kCommandsAtOnce; }

  // Until no copy of ours runs.
  void drain() {
    while (copying_ != 0) {
      for (uint32_t tag = engine_->poll(); tag != UINT32_MAX; tag = engine_->poll()) {
        --copying_;
        damage_read(commands_[tag]);
        commands_[tag].stage = Stage::Dropped;
      }
    }
  }

 private:
  enum class Stage : uint8_t { Waiting, Copying, Held, Hung, Dropped };
  struct Entry {
    ServedCommand command;
    Stage stage = Stage::Waiting;
    ModelFault model{};
    Fault fault{};
    bool write = false;
    uint16_t code = kSuccess;
    uint64_t release_ns = 0;       // Held: when
    uint64_t release_count = 0;    // or after so many completions
    uint64_t releases_before = 0;  // Hung
    std::vector<CopyPart> parts;
  };

  bool take() {
    bool any = begin_waiting();
    while (!free_.empty() && waiting_.empty()) {
      const uint32_t id = free_.back();
      Entry& entry = commands_[id];
      if (!server_.fetch(entry.command)) {
        break;
      }
      any = true;
      free_.pop_back();
      owner_.commands_.fetch_add(1, std::memory_order_relaxed);
      const uint32_t here = owner_.in_flight_.fetch_add(1, std::memory_order_relaxed) + 1;
      uint32_t most = owner_.most_.load(std::memory_order_relaxed);
      while (here > most && !owner_.most_.compare_exchange_weak(most, here, std::memory_order_relaxed)) {
      }
      begin(id);
    }
    return any;
  }

  void begin(uint32_t id) {
    Entry& entry = commands_[id];
    entry.model = owner_.has_rules_.load(std::memory_order_acquire) ? owner_.decide() : ModelFault{.every = 0};
    entry.fault = {};
    entry.code = prepare(entry);
    if (entry.model.every != 0 && entry.model.kind == ModelFaultKind::Code) {
      entry.code = entry.model.code;
    }
    if (entry.code == kSuccess && owner_.faults_ != nullptr) {
      const uint32_t device = entry.command.entry.nsid - 1;
      entry.fault = owner_.faults_->decide(entry.write ? Direction::Write : Direction::Read, device);
      if (entry.fault.kind == FaultKind::Error) {
        entry.code = code_of_status(status_of_result(-entry.fault.error, 1));
      } else if (entry.fault.kind == FaultKind::Short) {
        entry.code = code_of_status(Status::ShortIo);
      }
      damage_read(entry);
    }
    if (entry.model.every != 0 && entry.model.kind == ModelFaultKind::Lose) {
      entry.stage = Stage::Hung;
      entry.releases_before = UINT64_MAX;  // for ever
      hung_.push_back(id);
    } else if (entry.fault.kind == FaultKind::Hang) {
      entry.stage = Stage::Hung;
      entry.releases_before = owner_.faults_->releases();
      hung_.push_back(id);
    } else if (entry.code != kSuccess) {
      finish(id);
    } else {
      entry.stage = Stage::Waiting;
      waiting_.push_back(id);
      begin_waiting();
    }
  }

  bool begin_waiting() {
    bool any = false;
    while (!waiting_.empty()) {
      const uint32_t id = waiting_.front();
      if (!engine_->begin(id, commands_[id].parts)) {
        return any;
      }
      commands_[id].stage = Stage::Copying;
      ++copying_;
      waiting_.pop_front();
      any = true;
    }
    return any;
  }

  uint16_t prepare(Entry& entry) {
    const SubmissionEntry& command = entry.command.entry;
    const uint8_t opcode = opcode_of(command);
    if (opcode != kOpRead && opcode != kOpWrite) {
      return kInvalidOpcode;
    }
    if (command.nsid == 0 || command.nsid > options_.images.size()) {
      return kInvalidNamespace;
    }
    if (pointer_of(command) == DataPointer::Sgl && !options_.sgl) {
      return kInvalidField;
    }
    const auto [image, size] = options_.images[command.nsid - 1];
    const uint64_t bytes = uint64_t{blocks_of(command)} * options_.logical_block_bytes;
    const uint64_t offset = lba_of(command) * options_.logical_block_bytes;
    if (options_.largest_transfer != 0 && bytes > options_.largest_transfer) {
      return kInvalidField;
    }
    if (offset > size || bytes > size - offset) {
      return kLbaOutOfRange;
    }
    entry.write = opcode == kOpWrite;
    segments_.clear();
    if (const uint16_t code = walk_data(command, bytes, AddressSpace::identity(), segments_); code != kSuccess) {
      return code;
    }
    entry.parts.clear();
    uint64_t at = reinterpret_cast<uint64_t>(image) + offset;
    for (const auto& segment : segments_) {
      entry.parts.push_back(entry.write ? CopyPart{segment.address, at, segment.bytes}
                                        : CopyPart{at, segment.address, segment.bytes});
      at += segment.bytes;
    }
    return kSuccess;
  }

  // The bytes that arrive have a bit flipped, wherever they arrive: the image has it while they are copied. Flips it
  // back when called again.
  static void damage_read(const Entry& entry) noexcept {
    if (entry.fault.kind == FaultKind::Corrupt && !entry.write && entry.code == kSuccess) {
      flip_bit(reinterpret_cast<unsigned char*>(entry.parts.front().source), entry.parts.front().bytes,
               entry.fault.seed);
    }
  }

  void moved(uint32_t id) {
    --copying_;
    Entry& entry = commands_[id];
    damage_read(entry);
    if (entry.fault.kind == FaultKind::Corrupt && entry.write) {
      flip_bit(reinterpret_cast<unsigned char*>(entry.parts.front().target), entry.parts.front().bytes,
               entry.fault.seed);
    }
    finish(id);
  }

  // The data are where they belong, or won't be: complete, now or later.
  void finish(uint32_t id) {
    Entry& entry = commands_[id];
    const bool later = entry.model.every != 0 &&
                       (entry.model.kind == ModelFaultKind::Delay || entry.model.kind == ModelFaultKind::Reorder);
    if (!later) {
      complete(id);
      return;
    }
    entry.stage = Stage::Held;
    entry.release_ns = entry.model.kind == ModelFaultKind::Delay ? now_ns() + entry.model.delay_ns : UINT64_MAX;
    entry.release_count = entry.model.kind == ModelFaultKind::Reorder ? completed_ + entry.model.others : UINT64_MAX;
    held_.push_back(id);
  }

  void complete(uint32_t id) {
    const ServedCommand& command = commands_[id].command;
    while (!server_.complete(command.queue, identifier_of(command.entry), commands_[id].code)) {
      std::this_thread::yield();
    }
    ++completed_;
    owner_.in_flight_.fetch_sub(1, std::memory_order_relaxed);
    free_.push_back(id);
  }

  bool complete_held() {
    bool any = false;
    const bool alone = copying_ == 0 && waiting_.empty();
    for (size_t i = 0; i < held_.size();) {
      const Entry& entry = commands_[held_[i]];
      if (now_ns() >= entry.release_ns || completed_ >= entry.release_count ||
          (entry.release_count != UINT64_MAX && alone)) {
        const uint32_t id = held_[i];
        held_.erase(held_.begin() + static_cast<ptrdiff_t>(i));
        complete(id);
        any = true;
      } else {
        ++i;
      }
    }
    for (size_t i = 0; i < hung_.size();) {
      Entry& entry = commands_[hung_[i]];
      if (entry.releases_before != UINT64_MAX && owner_.faults_->releases() != entry.releases_before) {
        const uint32_t id = hung_[i];
        hung_.erase(hung_.begin() + static_cast<ptrdiff_t>(i));
        entry.code = code_of_status(Status::Cancelled);
        complete(id);
        any = true;
      } else {
        ++i;
      }
    }
    return any;
  }

  void answer_aborts() {
    for (uint32_t queue = 0; queue < numbers_.size(); ++queue) {
      if (owner_.aborts_[numbers_[queue]].load(std::memory_order_acquire) != kAbortAsked) {
        continue;
      }
      const auto of_queue = [&](uint32_t id) { return commands_[id].command.queue == queue; };
      const auto copies = [&] {
        return std::any_of(commands_.begin(), commands_.end(), [&](const Entry& entry) {
          return entry.stage == Stage::Copying && entry.command.queue == queue;
        });
      };
      const auto drop = [&](uint32_t id) {
        if (!of_queue(id)) {
          return false;
        }
        if (commands_[id].stage == Stage::Waiting || commands_[id].stage == Stage::Copying) {
          damage_read(commands_[id]);
        }
        commands_[id].stage = Stage::Dropped;
        owner_.in_flight_.fetch_sub(1, std::memory_order_relaxed);
        free_.push_back(id);
        return true;
      };
      std::erase_if(waiting_, drop);
      std::erase_if(held_, drop);
      std::erase_if(hung_, drop);
      while (copying_ != 0 && copies()) {  // what has begun ends; its completion is dropped
        for (uint32_t tag = engine_->poll(); tag != UINT32_MAX; tag = engine_->poll()) {
          if (drop(tag)) {
            --copying_;
          } else {
            moved(tag);
          }
        }
      }
      server_.close(queue);
      owner_.aborts_[numbers_[queue]].store(kAborted, std::memory_order_release);
    }
  }

  MemoryController& owner_;
  const MemoryControllerOptions& options_;
  QueueServer server_;
  std::vector<uint32_t> numbers_;  // of the queues, as the owner counts them
  CopyEngine* engine_ = nullptr;
  std::unique_ptr<CopyEngine> own_;
  std::vector<Entry> commands_;
  std::vector<uint32_t> free_;
  std::deque<uint32_t> waiting_;
  std::vector<uint32_t> held_;
  std::vector<uint32_t> hung_;
  std::vector<Segment> segments_;
  uint32_t copying_ = 0;
  uint64_t completed_ = 0;
};

MemoryController::MemoryController(std::vector<ServedQueue> queues, MemoryControllerOptions options,
                                   FaultInjector* faults)
    : queues_(std::move(queues)), options_(std::move(options)), faults_(faults), aborts_(queues_.size()) {
  for (uint32_t thread = 0; thread < options_.threads; ++thread) {
    threads_.emplace_back([this, thread] {
      Lane lane(*this, thread);
      uint32_t empty = 0;
      while (!stopping()) {
        if (lane.turn()) {
          empty = 0;
        } else if (!is_awake() && lane.idle()) {
          wait_awake(kLongestSleep);
        } else if (++empty > kSpins) {
          std::this_thread::yield();
        }
      }
      lane.drain();
    });
  }
}

MemoryController::~MemoryController() { stop(); }

void MemoryController::add_fault(const ModelFault& fault) {
  const std::lock_guard lock(mutex_);
  rules_.push_back({fault});
  has_rules_.store(true, std::memory_order_release);
}

void MemoryController::clear_faults() {
  const std::lock_guard lock(mutex_);
  rules_.clear();
  has_rules_.store(false, std::memory_order_release);
}

ModelFault MemoryController::decide() {
  const std::lock_guard lock(mutex_);
  for (auto& rule : rules_) {
    if (++rule.seen % rule.fault.every == 0 && rule.fault.limit > 0) {
      --rule.fault.limit;
      return rule.fault;
    }
  }
  return {.every = 0};
}

void MemoryController::abort(uint32_t queue) {
  aborts_[queue].store(kAbortAsked, std::memory_order_release);
  while (aborts_[queue].load(std::memory_order_acquire) != kAborted && !stopping()) {
    std::this_thread::yield();
  }
}

}  // namespace tutti::nvme
