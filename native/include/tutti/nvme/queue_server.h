// The controller's half of queue pairs, for controllers that are software: takes commands from submission queues in
// memory, and posts completions with phase bits. Used by one thread. The issuer may be a GPU, a thread, or a guest's
// driver: it sees the NVMe protocol and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tutti/nvme/command.h"

namespace tutti::nvme {

// A piece of the memory that a command names, as the controller sees it.
struct Segment {
  uint64_t address;
  uint64_t bytes;
};

// Turns device addresses into this process's pointers; nullptr = a DMA that an IOMMU would refuse. The software
// controllers here are given addresses of their own process and use `identity`.
struct AddressSpace {
  const void* (*translate)(uint64_t address, uint64_t bytes) noexcept;
  static AddressSpace identity() noexcept {
    return {[](uint64_t address, uint64_t) noexcept -> const void* { return reinterpret_cast<const void*>(address); }};
  }
};

// Walks PRP entries and lists, or SGL descriptors and segments, of a command that moves `bytes`. Appends to `out`.
// Returns kSuccess or the code that a controller answers a malformed description with.
uint16_t walk_data(const SubmissionEntry& entry, uint64_t bytes, AddressSpace memory, std::vector<Segment>& out);

struct ServedQueue {
  const SubmissionEntry* sq = nullptr;
  CompletionEntry* cq = nullptr;
  const uint32_t* sq_doorbell = nullptr;
  const uint32_t* cq_doorbell = nullptr;
  uint32_t entries = 0;
};

struct ServedCommand {
  uint32_t queue = 0;
  SubmissionEntry entry{};
};

class QueueServer {
 public:
  void add(const ServedQueue& queue) { queues_.push_back({queue, 0, 0, 1}); }
  [[nodiscard]] size_t queues() const noexcept { return queues_.size(); }

  // The next command of any queue, round robin; false when there is none. A doorbell value outside the queue is
  // ignored, as the specification wants it (and counted).
  bool fetch(ServedCommand& command) noexcept;
  // Takes no more commands of a queue.
  void close(uint32_t queue) noexcept { queues_[queue].closed = true; }
  // Posts a completion. False when the completion queue is full: try again later.
  bool complete(uint32_t queue, uint16_t identifier, uint16_t code) noexcept;
  [[nodiscard]] uint64_t bad_doorbells() const noexcept { return bad_doorbells_; }

 private:
  struct State {
    ServedQueue memory;
    uint32_t head;  // of the submission queue
    uint32_t tail;  // of the completion queue
    uint16_t phase;
    bool closed = false;
  };
  std::vector<State> queues_;
  size_t turn_ = 0;
  uint64_t bad_doorbells_ = 0;
};

}  // namespace tutti::nvme
