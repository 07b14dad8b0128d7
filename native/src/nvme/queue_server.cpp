#include "tutti/nvme/queue_server.h"

#include <cstring>

#include "tutti/nvme/p2p_table.h"

namespace tutti::nvme {
namespace {

constexpr uint64_t kMostSegments = 4096;  // of one command; a longer chain is malformed or a loop

uint16_t walk_prp(const SubmissionEntry& entry, uint64_t bytes, AddressSpace memory, std::vector<Segment>& out) {
  const uint64_t room = kPrpPageBytes - entry.dptr_lo % kPrpPageBytes;
  uint64_t left = bytes;
  const auto take = [&](uint64_t address, uint64_t most) {
    const uint64_t part = left < most ? left : most;
    if (!out.empty() && out.back().address + out.back().bytes == address) {
      out.back().bytes += part;
    } else {
      out.push_back({address, part});
    }
    left -= part;
  };
  take(entry.dptr_lo, room);
  if (left == 0) {
    return kSuccess;
  }
  if (left <= kPrpPageBytes) {
    if (entry.dptr_hi % kPrpPageBytes != 0) {
      return kInvalidPrpOffset;
    }
    take(entry.dptr_hi, kPrpPageBytes);
    return kSuccess;
  }
  uint64_t list = entry.dptr_hi;
  if (list % 8 != 0) {
    return kInvalidPrpOffset;
  }
  for (uint64_t lists = 0; left != 0; ++lists) {
    const uint64_t entries = (kPrpPageBytes - list % kPrpPageBytes) / 8;
    const auto* at = static_cast<const uint64_t*>(memory.translate(list, entries * 8));
    if (at == nullptr || lists == kMostSegments) {
      return kDataTransferError;
    }
    for (uint64_t i = 0; i < entries && left != 0; ++i) {
      if (i + 1 == entries && left > kPrpPageBytes) {  // the last entry of a full list points at the next one
        list = at[i];
        break;
      }
      if (at[i] % kPrpPageBytes != 0) {
        return kInvalidPrpOffset;
      }
      take(at[i], kPrpPageBytes);
    }
  }
  return kSuccess;
}

uint16_t walk_sgl(const SubmissionEntry& entry, uint64_t bytes, AddressSpace memory, std::vector<Segment>& out) {
  uint64_t left = bytes;
  const auto take = [&](DataDescriptor descriptor) -> uint16_t {
    if (sgl_bytes(descriptor) > left) {
      return kSglLengthInvalid;
    }
    if (sgl_bytes(descriptor) != 0) {
      out.push_back({descriptor.lo, sgl_bytes(descriptor)});
    }
    left -= sgl_bytes(descriptor);
    return kSuccess;
  };
  DataDescriptor at{entry.dptr_lo, entry.dptr_hi};
  if (sgl_identifier(at) == kSglDataBlock) {
    const uint16_t code = take(at);
    return code != kSuccess ? code : (left == 0 ? kSuccess : kSglLengthInvalid);
  }
  for (uint64_t segments = 0;; ++segments) {
    const bool last = sgl_identifier(at) == kSglLastSegment;
    if (!last && sgl_identifier(at) != kSglSegment) {
      return kSglTypeInvalid;
    }
    const uint64_t entries = sgl_bytes(at) / sizeof(DataDescriptor);
    if (sgl_bytes(at) % sizeof(DataDescriptor) != 0 || entries == 0 || segments == kMostSegments) {
      return kInvalidSglSegment;
    }
    const auto* list = static_cast<const DataDescriptor*>(memory.translate(at.lo, sgl_bytes(at)));
    if (list == nullptr) {
      return kDataTransferError;
    }
    for (uint64_t i = 0; i < entries; ++i) {
      if (!last && i + 1 == entries) {
        at = list[i];
        break;
      }
      if (sgl_identifier(list[i]) != kSglDataBlock) {
        return kInvalidSglCount;
      }
      if (const uint16_t code = take(list[i]); code != kSuccess) {
        return code;
      }
    }
    if (last) {
      return left == 0 ? kSuccess : kSglLengthInvalid;
    }
  }
}

}  // namespace

uint16_t walk_data(const SubmissionEntry& entry, uint64_t bytes, AddressSpace memory, std::vector<Segment>& out) {
  return pointer_of(entry) == DataPointer::Prp ? walk_prp(entry, bytes, memory, out)
                                               : walk_sgl(entry, bytes, memory, out);
}

bool QueueServer::fetch(ServedCommand& command) noexcept {
  for (size_t looked = 0; looked < queues_.size(); ++looked) {
    const size_t index = turn_;
    turn_ = turn_ + 1 == queues_.size() ? 0 : turn_ + 1;
    State& queue = queues_[index];
    if (queue.closed) {
      continue;
    }
    const uint32_t tail = load_acquire(queue.memory.sq_doorbell);
    if (tail >= queue.memory.entries) {
      ++bad_doorbells_;
      continue;
    }
    if (tail != queue.head) {
      command.queue = static_cast<uint32_t>(index);
      command.entry = queue.memory.sq[queue.head];
      queue.head = (queue.head + 1) % queue.memory.entries;
      return true;
    }
  }
  return false;
}

bool QueueServer::complete(uint32_t index, uint16_t identifier, uint16_t code) noexcept {
  State& queue = queues_[index];
  const uint32_t next = (queue.tail + 1) % queue.memory.entries;
  if (next == load_acquire(queue.memory.cq_doorbell)) {
    return false;
  }
  CompletionEntry& entry = queue.memory.cq[queue.tail];
  entry.dw0 = 0;
  entry.dw1 = 0;
  entry.sq = queue.head | index << 16;
  store_release(&entry.status, completion_word(identifier, queue.phase, code));
  queue.tail = next;
  queue.phase ^= next == 0 ? 1U : 0U;
  return true;
}

}  // namespace tutti::nvme
