#include "tutti/nvme/queue_issuer.h"

#include <algorithm>

namespace tutti::nvme {
namespace {

// Polls between two looks at the clock; each pause is some tens of nanoseconds.
constexpr uint32_t kSpins = 64;

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

QueueIssuer::QueueIssuer(const QueuePair& pair)
    : pair_(pair),
      tags_(pair.entries - 1),
      busy_(pair.entries - 1),
      free_slots_(pair.entries - 1),
      completed_(pair.entries - 1),
      free_count_(pair.entries - 1) {
  for (uint32_t i = 0; i < free_count_; ++i) {
    free_slots_[i] = static_cast<uint16_t>(free_count_ - 1 - i);
  }
}

Status QueueIssuer::push(const Command& command, uint64_t tag) noexcept {
  if (quarantined_) {
    return Status::BadState;
  }
  const bool flush = command.opcode == kOpFlush;
  if (!flush && (command.range == nullptr || (command.opcode != kOpRead && command.opcode != kOpWrite) ||
                 !transferable(pair_, *command.range, command.address, command.blocks))) {
    return Status::BadState;
  }
  if (free_count_ == 0) {
    return Status::Retry;
  }
  const uint16_t slot = free_slots_[--free_count_];
  tags_[slot] = tag;
  busy_[slot] = 1;
  SubmissionEntry& entry = pair_.sq[tail_];
  if (flush) {
    entry = SubmissionEntry{};
    entry.cdw0 = command_word(kOpFlush, DataPointer::Prp, slot);
    entry.nsid = pair_.nsid;
  } else {
    const uint32_t bytes = command.blocks * pair_.block_bytes;
    entry = transfer_command(command.opcode == kOpWrite, pair_.pointer, slot, pair_.nsid, command.lba, command.blocks,
                             describe(pair_, *command.range, command.address, bytes, slot));
  }
  tail_ = tail_ + 1 == pair_.entries ? 0 : tail_ + 1;
  return Status::Ok;
}

void QueueIssuer::submit() noexcept {
  if (rung_ != tail_ && !quarantined_) {
    ring_doorbell(pair_.sq_doorbell, tail_);
    rung_ = tail_;
    ++doorbells_;
  }
}

uint32_t QueueIssuer::poll(Completed* out, uint32_t room) noexcept {
  uint32_t found = 0;
  while (found < room && !quarantined_) {
    CompletionEntry entry{};
    entry.status = load_completion(&pair_.cq[head_]);
    if (phase_of(entry) != phase_) {
      break;
    }
    const uint16_t slot = identifier_of(entry);
    if (slot >= busy_.size() || busy_[slot] == 0) {
      quarantined_ = true;  // the device answers what nobody asked: nothing that it says can be trusted any more
      break;
    }
    busy_[slot] = 0;
    free_slots_[free_count_++] = slot;
    const uint16_t code = code_of(entry);
    out[found++] = {tags_[slot], {status_of_code(code), code}};
    head_ = head_ + 1 == pair_.entries ? 0 : head_ + 1;
    phase_ = static_cast<uint16_t>(phase_ ^ (head_ == 0 ? 1 : 0));
  }
  if (found != 0) {
    ring_doorbell(pair_.cq_doorbell, head_);
  }
  return found;
}

uint32_t QueueIssuer::abandon(Completed* out, uint32_t room) noexcept {
  quarantined_ = true;
  uint32_t found = 0;
  for (uint32_t slot = 0; slot < busy_.size() && found < room; ++slot) {
    if (busy_[slot] != 0) {
      busy_[slot] = 0;  // its place is not given back: in_flight() goes on counting it
      out[found++] = {tags_[slot], {Status::Timeout, 0}};
    }
  }
  return found;
}

Status QueueIssuer::run(const Command* commands, CommandResult* results, uint32_t count,
                        Clock::time_point deadline) noexcept {
  std::fill(results, results + count, CommandResult{});
  const auto room = static_cast<uint32_t>(completed_.size());
  uint32_t next = 0;
  uint32_t ended = 0;
  uint32_t spins = 0;
  const auto take = [this, results](uint32_t found) {
    for (uint32_t i = 0; i < found; ++i) {
      results[completed_[i].tag] = completed_[i].result;
    }
    return found;
  };
  while (ended < count) {
    for (; next < count; ++next) {
      const Status status = push(commands[next], next);
      if (status == Status::Retry) {
        break;
      }
      if (status != Status::Ok) {
        results[next].status = status;
        ++ended;
      }
    }
    submit();
    const uint32_t found = take(poll(completed_.data(), room));
    ended += found;
    if (found == 0) {
      pause();
    }
    if (quarantined_ || ((found != 0 || ++spins % kSpins == 0) && Clock::now() >= deadline)) {
      // A last look: this thread may have been kept from running, rather than the device from answering.
      take(poll(completed_.data(), room));
      if (in_flight() != 0) {
        take(abandon(completed_.data(), room));
      }
      break;
    }
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (results[i].status != Status::Ok) {
      return results[i].status;
    }
  }
  return Status::Ok;
}

}  // namespace tutti::nvme
