// What the rings carry: batches of transfers (IOCB), single transfers (IOCTX) and completions (CQE). The same bytes for
// CPU and GPU executors. Source: Tutti (arXiv 2605.03375), GPU io_uring; the layout is ours.
#pragma once

#include <array>
#include <cstdint>

namespace tutti {

inline constexpr uint32_t kIoctxPerIocb = 2048;
inline constexpr uint32_t kLbaBytes = 512;

enum class Direction : uint8_t { Read = 0, Write = 1 };

struct alignas(32) Ioctx {
  uint64_t descriptor_lo;  // address in the engine's memory; 0 = nothing to move
  uint64_t descriptor_hi;  // length | index of the registered range << 32 (kNoBuffer = none)
  uint64_t lba;            // in units of kLbaBytes on `device`
  uint32_t blocks_flags;   // device blocks - 1
  uint16_t device;
  uint16_t status_slot;  // position inside the IOCB
};
static_assert(sizeof(Ioctx) == 32);

inline constexpr uint32_t kNoBuffer = 0xFFFFFFFFU;

// Plain words, for they may lie in memory that a GPU reads; those that several threads change are used by atomic_ref.
struct alignas(128) IocbHeader {
  uint32_t id = 0;
  uint32_t generation = 0;
  Direction direction = Direction::Read;
  uint8_t reserved0 = 0;
  uint16_t num_ioctx = 0;
  uint32_t cancelled = 0;  // set while it runs: contexts that nobody has begun end as Cancelled
  uint64_t device_mask = 0;
  uint64_t dependency_event = 0;  // 0 = none; a CUDA event on GPU executors
  uint64_t plan = 0;              // the plan that the contexts belong to
  uint64_t first_item = 0;        // index in the plan of context 0
  uint32_t done = 0;
  uint32_t first_error = 0;  // status << 16 | status slot
};
static_assert(sizeof(IocbHeader) == 128);

struct Iocb {
  IocbHeader header;
  std::array<Ioctx, kIoctxPerIocb> contexts;
};

struct Cqe {
  uint32_t iocb;
  uint32_t generation;
  uint32_t status;  // Status of the first context that failed, else Ok
  uint32_t contexts;
};
static_assert(sizeof(Cqe) == 16);

}  // namespace tutti
