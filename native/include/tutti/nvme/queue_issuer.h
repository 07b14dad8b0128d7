// Drives one I/O queue pair from one CPU thread: fills commands, rings once per batch, polls by the phase bit.
//
// Invariants: a command identifier is the number of its slot, and a slot's scratch page is rewritten only when its
// command has completed; at most entries - 1 commands are in flight, so neither queue can overflow; nothing here
// throws or allocates after construction. A deadline that passes quarantines the pair: its commands end as Timeout, it
// takes no new ones, and since the device may still read and write their memory, that memory must stay mapped until the
// pair was deleted or its controller stopped.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "tutti/nvme/queue_pair.h"
#include "tutti/status.h"

namespace tutti::nvme {

struct Command {
  uint8_t opcode = kOpRead;  // kOpRead, kOpWrite; kOpFlush uses no other field
  uint64_t lba = 0;
  uint32_t blocks = 0;
  const P2pRange* range = nullptr;
  uint64_t address = 0;  // virtual, inside the range
};

struct CommandResult {
  Status status = Status::Cancelled;
  uint16_t code = 0;  // of NVMe: sct << 8 | sc
};

struct Completed {
  uint64_t tag = 0;
  CommandResult result;
};

class QueueIssuer {
 public:
  using Clock = std::chrono::steady_clock;

  explicit QueueIssuer(const QueuePair& pair);

  // Puts one command into the queue; submit() makes the device see it. Retry: the queue is full; poll first. BadState:
  // no command can carry this transfer, or the pair is quarantined. `tag` comes back with the result.
  Status push(const Command& command, uint64_t tag) noexcept;
  // One doorbell for all commands pushed since the last one.
  void submit() noexcept;
  // Takes up to `room` completions that are there; never waits. Frees their places by one doorbell.
  uint32_t poll(Completed* out, uint32_t room) noexcept;
  // Gives up on everything in flight: up to `room` results, each Timeout, and quarantine.
  uint32_t abandon(Completed* out, uint32_t room) noexcept;

  // All of it: pushes as many as fit, one doorbell per batch, polls until every command has ended or the deadline
  // passes. results[i] belongs to commands[i]; one that was never pushed is Cancelled. Returns Ok, or the first failure
  // by index. Nothing else may be in flight.
  Status run(const Command* commands, CommandResult* results, uint32_t count, Clock::time_point deadline) noexcept;

  [[nodiscard]] uint32_t in_flight() const noexcept { return pair_.entries - 1 - free_count_; }
  [[nodiscard]] bool quarantined() const noexcept { return quarantined_; }
  [[nodiscard]] const QueuePair& pair() const noexcept { return pair_; }
  [[nodiscard]] uint64_t doorbells() const noexcept { return doorbells_; }

 private:
  QueuePair pair_;
  std::vector<uint64_t> tags_;        // by slot
  std::vector<uint8_t> busy_;         // by slot
  std::vector<uint16_t> free_slots_;  // the first free_count_ are free
  std::vector<Completed> completed_;  // room for run()
  uint32_t free_count_ = 0;
  uint32_t tail_ = 0;
  uint32_t rung_ = 0;  // the tail that the device knows
  uint32_t head_ = 0;
  uint16_t phase_ = 1;
  bool quarantined_ = false;
  uint64_t doorbells_ = 0;
};

}  // namespace tutti::nvme
