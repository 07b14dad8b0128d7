// How an operation ended. One enum for native code and Python; tutti_mooncake/errors.py holds the table between the
// two. Rejected, Exists and Retry are answers, not faults.
#pragma once

#include <cerrno>
#include <cstdint>

namespace tutti {

enum class Status : uint8_t {
  Ok = 0,
  NotFound = 1,
  Rejected = 2,       // by policy: admission, budget, read-only mode, a parent that is not there
  Exists = 3,         // already stored or being stored
  Retry = 4,          // the kernel asked for it and went on asking (EAGAIN)
  DeviceError = 5,    // EIO and every other errno of a device
  ShortIo = 6,        // fewer bytes than asked for
  NoSpace = 7,        // ENOSPC, EDQUOT
  ChecksumError = 8,  // the bytes are not those that were stored
  Stale = 9,          // the slot belongs to another generation or key by now
  Timeout = 10,       // the deadline passed
  Cancelled = 11,
  BadState = 12,  // the caller broke the contract, or the store is closed
};

// Maps the result of a read or write of `wanted` bytes (negative errno, or a byte count) to a status.
constexpr Status status_of_result(int64_t result, uint64_t wanted) noexcept {
  if (result >= 0) {
    return static_cast<uint64_t>(result) == wanted ? Status::Ok : Status::ShortIo;
  }
  switch (static_cast<int>(-result)) {
    case EAGAIN:
    case EINTR:
    case EBUSY:
      return Status::Retry;
    case ENOSPC:
    case EDQUOT:
      return Status::NoSpace;
    case ECANCELED:
      return Status::Cancelled;
    case ETIME:
    case ETIMEDOUT:
      return Status::Timeout;
    default:
      return Status::DeviceError;
  }
}

}  // namespace tutti
