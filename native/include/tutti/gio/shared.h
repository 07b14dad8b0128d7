// What the GPU's I/O kernel and the host share: the ring of IOCBs, the queue pairs that the kernel's issuing warps own,
// and the scratch that the warps of one thread block work over together. Plain structures of pointers, passed by value.
//
// Who writes what: the host writes `submitted`, `submitted_tail`, IOCB headers and contexts, and the sums that reads
// must have; the GPU writes completions, statuses and the sums of writes. Words in GPU memory (`cursor`, `done`,
// `first_error`, `completion_tail`, `unable`) are changed by the GPU alone and are zero before the first kernel;
// `unable` is zero again before each.
#pragma once

#include <cstdint>

#include "tutti/iocb.h"
#include "tutti/nvme/p2p_table.h"
#include "tutti/nvme/queue_pair.h"

namespace tutti::gio {

inline constexpr uint32_t kLanes = 32;         // commands in flight per issuing warp, at most
inline constexpr uint32_t kQueueEntries = 64;  // of each queue: more than kLanes, so that none is ever full
inline constexpr uint32_t kMaxIssuers = 8;     // issuing warps of a thread block
inline constexpr uint32_t kLargestObject = 4U << 20;
inline constexpr uint32_t kSegmentBytes = 4096;  // what a warp moves at a time; a checksum block

struct RingView {
  uint32_t depth = 0;  // IOCBs, a power of two
  // Memory that both sides see.
  const Iocb* iocbs = nullptr;
  const uint32_t* submitted = nullptr;       // [depth]: id << 16 | contexts, of the IOCB at each position
  const uint32_t* submitted_tail = nullptr;  // positions written so far
  Cqe* completions = nullptr;                // [depth]
  uint32_t* completion_ready = nullptr;      // [depth]: position + 1 once the completion there is whole
  uint64_t* sums = nullptr;                  // [depth][kIoctxPerIocb]
  uint8_t* statuses = nullptr;               // [depth][kIoctxPerIocb], written where a context isn't Ok
  // GPU memory.
  uint64_t* cursor = nullptr;  // position << 32 | next context there
  uint32_t* done = nullptr;    // [depth]: contexts that have ended, by IOCB id
  uint32_t* first_error = nullptr;
  uint32_t* completion_tail = nullptr;
  uint32_t* closing = nullptr;  // number of the kernel whose warps leave
  uint32_t* unable = nullptr;   // issuing warps that have found a queue pair of theirs out of use
};

// Why a queue pair takes no more commands. The issuing warp asks for quarantine when a command outlasts its time; the
// host answers once no device can touch the commands' memory any more. It may retire a working pair too.
enum class PairState : uint32_t { Working = 0, Quarantine = 1, Retired = 2 };

// One NVMe queue pair of an issuing warp: a drive's own, or one that a software controller serves. It has kQueueEntries
// entries, and a scratch page for each lane. Device d of pair p has namespace nsid + (d - p).
struct IssuerPair : nvme::QueuePair {
  uint32_t* state = nullptr;  // PairState, in memory that both sides see
  // The issuer's place in the queues, kept from kernel to kernel.
  uint32_t tail = 0;
  uint32_t head = 0;
  uint32_t phase = 1;
};

// Everything that one issuing warp owns.
struct IssuerQueues {
  IssuerPair* pairs = nullptr;     // [pairs_per_issuer], in GPU memory
  unsigned char* slots = nullptr;  // [kLanes][object_bytes]: bounce memory that the controller reads and writes
  const nvme::P2pRange* slot_range = nullptr;  // where the controller sees it
};

struct IssueOptions {
  uint32_t payload_bytes = 0;              // of an object
  uint32_t object_bytes = 0;               // padded to the device's logical block
  uint32_t block_shift = 9;                // log2 of the device's logical block
  uint32_t issuers = 1;                    // issuing warps of the whole kernel
  uint32_t pairs_per_issuer = 1;           // device d is served by pair d % pairs_per_issuer
  uint32_t lanes = kLanes;                 // commands in flight per issuing warp
  bool bounce = true;                      // data pass through the issuer's slots; else the device moves them itself
  const nvme::P2pRange* ranges = nullptr;  // by registered range; needed without bounce
  uint64_t command_timeout_ns = 0;
  uint32_t kernel = 0;     // number of the launch, from 1
  uint64_t linger_ns = 0;  // how long an idle warp looks for more work before it leaves
};

// A piece of work for the moving warps of a block: copy an object and take its sum, or take the sum alone.
struct Job {
  uint64_t source = 0;
  uint64_t target = 0;     // 0 = nothing is copied
  uint64_t sum = 0;        // before checksum_mix
  uint32_t remaining = 0;  // segments
  uint32_t done = 0;
};

inline constexpr uint32_t kJobs = kMaxIssuers * kLanes;

// Shared by the warps of one block. Zero at the start of each kernel but for `issuers`.
struct BlockShared {
  Job jobs[kJobs];        // job = issuer in block * kLanes + lane
  uint32_t order[kJobs];  // by turn: (turn + 1) << 10 | job; as many as there can be jobs, so none is overwritten early
  uint32_t codes[kJobs];  // 1 << 16 | status code of the command that ended, until its lane has taken it
  uint32_t published;     // turns handed out
  uint32_t issuers;       // issuing warps that haven't left
  uint64_t ticket;        // segments handed out
};

}  // namespace tutti::gio
