// The NVMe wire format: what goes through a queue pair, bit for bit, and what a controller says of itself.
//
// Sources: NVM Express Base 2.0c (queue entries 3.3.3, PRP 4.1.1, SGL 4.1.2, Identify 5.17, queue creation 5.4, 5.5),
// NVM Command Set 1.0c (Read 3.2.4, Write 3.2.6, Flush), PCIe Transport 1.0c (registers and doorbells 3.1). All fields
// are little-endian, as every machine that this runs on is. Nothing here allocates, throws or does I/O; all of it runs
// on host and GPU.
#pragma once

#include <cstdint>

#include "tutti/host_device.h"
#include "tutti/status.h"

namespace tutti::nvme {

// --- entries ---

// PSDT, bits 15:14 of the first command word: how DPTR describes the data.
enum class DataPointer : uint8_t { Prp = 0, Sgl = 1 };

struct alignas(64) SubmissionEntry {
  uint32_t cdw0;  // opcode 7:0, FUSE 9:8, PSDT 15:14, command identifier 31:16
  uint32_t nsid;
  uint32_t cdw2;
  uint32_t cdw3;
  uint64_t metadata;
  uint64_t dptr_lo;  // PRP entry 1, or the SGL descriptor's address
  uint64_t dptr_hi;  // PRP entry 2, or its length, reserved bytes and identifier
  uint32_t cdw10;
  uint32_t cdw11;
  uint32_t cdw12;
  uint32_t cdw13;
  uint32_t cdw14;
  uint32_t cdw15;
};
static_assert(sizeof(SubmissionEntry) == 64);

struct alignas(16) CompletionEntry {
  uint32_t dw0;
  uint32_t dw1;
  uint32_t sq;      // submission queue head 15:0, its identifier 31:16
  uint32_t status;  // command identifier 15:0, phase 16, status field 31:17
};
static_assert(sizeof(CompletionEntry) == 16);

inline constexpr uint8_t kOpFlush = 0x00;
inline constexpr uint8_t kOpWrite = 0x01;
inline constexpr uint8_t kOpRead = 0x02;

inline constexpr uint8_t kAdminDeleteSq = 0x00;
inline constexpr uint8_t kAdminCreateSq = 0x01;
inline constexpr uint8_t kAdminDeleteCq = 0x04;
inline constexpr uint8_t kAdminCreateCq = 0x05;
inline constexpr uint8_t kAdminIdentify = 0x06;
inline constexpr uint8_t kAdminSetFeatures = 0x09;
inline constexpr uint32_t kFeatureQueues = 0x07;

TUTTI_HD constexpr uint32_t command_word(uint8_t opcode, DataPointer pointer, uint16_t identifier) noexcept {
  return static_cast<uint32_t>(opcode) | static_cast<uint32_t>(pointer) << 14 | static_cast<uint32_t>(identifier) << 16;
}
TUTTI_HD constexpr uint8_t opcode_of(const SubmissionEntry& entry) noexcept {
  return static_cast<uint8_t>(entry.cdw0 & 0xFF);
}
TUTTI_HD constexpr DataPointer pointer_of(const SubmissionEntry& entry) noexcept {
  return (entry.cdw0 >> 14 & 3) == 0 ? DataPointer::Prp : DataPointer::Sgl;
}
TUTTI_HD constexpr uint16_t identifier_of(const SubmissionEntry& entry) noexcept {
  return static_cast<uint16_t>(entry.cdw0 >> 16);
}

// The two halves of DPTR.
struct DataDescriptor {
  uint64_t lo = 0;
  uint64_t hi = 0;
};

// Read or Write of `blocks` logical blocks (1 to 65,536).
TUTTI_HD constexpr SubmissionEntry transfer_command(bool write, DataPointer pointer, uint16_t identifier, uint32_t nsid,
                                                    uint64_t lba, uint32_t blocks, DataDescriptor data) noexcept {
  SubmissionEntry entry{};
  entry.cdw0 = command_word(write ? kOpWrite : kOpRead, pointer, identifier);
  entry.nsid = nsid;
  entry.dptr_lo = data.lo;
  entry.dptr_hi = data.hi;
  entry.cdw10 = static_cast<uint32_t>(lba);
  entry.cdw11 = static_cast<uint32_t>(lba >> 32);
  entry.cdw12 = blocks - 1;
  return entry;
}
TUTTI_HD constexpr uint64_t lba_of(const SubmissionEntry& entry) noexcept {
  return entry.cdw10 | static_cast<uint64_t>(entry.cdw11) << 32;
}
TUTTI_HD constexpr uint32_t blocks_of(const SubmissionEntry& entry) noexcept { return (entry.cdw12 & 0xFFFF) + 1; }

constexpr SubmissionEntry identify_command(uint16_t identifier, uint32_t nsid, uint8_t what, uint64_t page) noexcept {
  SubmissionEntry entry{};
  entry.cdw0 = command_word(kAdminIdentify, DataPointer::Prp, identifier);
  entry.nsid = nsid;
  entry.dptr_lo = page;
  entry.cdw10 = what;  // CNS: 0 = namespace, 1 = controller
  return entry;
}
// `entries`: 2 to 65,536; the queue is physically contiguous at `address`. No interrupts: completions are polled.
constexpr SubmissionEntry create_cq_command(uint16_t identifier, uint16_t queue, uint32_t entries,
                                            uint64_t address) noexcept {
  SubmissionEntry entry{};
  entry.cdw0 = command_word(kAdminCreateCq, DataPointer::Prp, identifier);
  entry.dptr_lo = address;
  entry.cdw10 = queue | (entries - 1) << 16;
  entry.cdw11 = 1;  // PC
  return entry;
}
constexpr SubmissionEntry create_sq_command(uint16_t identifier, uint16_t queue, uint32_t entries, uint64_t address,
                                            uint16_t completion_queue) noexcept {
  SubmissionEntry entry{};
  entry.cdw0 = command_word(kAdminCreateSq, DataPointer::Prp, identifier);
  entry.dptr_lo = address;
  entry.cdw10 = queue | (entries - 1) << 16;
  entry.cdw11 = 1U | static_cast<uint32_t>(completion_queue) << 16;  // PC, priority 0 (unused under round robin)
  return entry;
}
constexpr SubmissionEntry delete_queue_command(uint16_t identifier, bool submission, uint16_t queue) noexcept {
  SubmissionEntry entry{};
  entry.cdw0 = command_word(submission ? kAdminDeleteSq : kAdminDeleteCq, DataPointer::Prp, identifier);
  entry.cdw10 = queue;
  return entry;
}
// Asks for `pairs` I/O queue pairs; the completion's dw0 says how many were granted (granted_pairs).
constexpr SubmissionEntry set_queues_command(uint16_t identifier, uint16_t pairs) noexcept {
  SubmissionEntry entry{};
  entry.cdw0 = command_word(kAdminSetFeatures, DataPointer::Prp, identifier);
  entry.cdw10 = kFeatureQueues;
  entry.cdw11 = (pairs - 1U) | (pairs - 1U) << 16;
  return entry;
}
constexpr uint32_t granted_pairs(uint32_t dw0) noexcept {
  const uint32_t submission = (dw0 & 0xFFFF) + 1;
  const uint32_t completion = (dw0 >> 16) + 1;
  return submission < completion ? submission : completion;
}

// --- SGL ---

inline constexpr uint8_t kSglDataBlock = 0x00;
inline constexpr uint8_t kSglSegment = 0x20;
inline constexpr uint8_t kSglLastSegment = 0x30;

// 16 bytes: address, length in bytes, three reserved bytes, identifier (type 7:4, subtype 3:0; 0 = address).
TUTTI_HD constexpr DataDescriptor sgl(uint8_t identifier, uint64_t address, uint32_t bytes) noexcept {
  return {address, static_cast<uint64_t>(bytes) | static_cast<uint64_t>(identifier) << 56};
}
TUTTI_HD constexpr uint8_t sgl_identifier(DataDescriptor descriptor) noexcept {
  return static_cast<uint8_t>(descriptor.hi >> 56);
}
TUTTI_HD constexpr uint32_t sgl_bytes(DataDescriptor descriptor) noexcept {
  return static_cast<uint32_t>(descriptor.hi);
}

// --- completions ---

TUTTI_HD constexpr uint16_t phase_of(const CompletionEntry& entry) noexcept {
  return static_cast<uint16_t>(entry.status >> 16 & 1);
}
TUTTI_HD constexpr uint16_t identifier_of(const CompletionEntry& entry) noexcept {
  return static_cast<uint16_t>(entry.status);
}
// Status code type and code: sct << 8 | sc; 0 = success.
TUTTI_HD constexpr uint16_t code_of(const CompletionEntry& entry) noexcept {
  return static_cast<uint16_t>((entry.status >> 25 & 7) << 8 | (entry.status >> 17 & 0xFF));
}
TUTTI_HD constexpr uint32_t completion_word(uint16_t identifier, uint16_t phase, uint16_t code) noexcept {
  return static_cast<uint32_t>(identifier) | static_cast<uint32_t>(phase & 1) << 16 |
         static_cast<uint32_t>(code & 0xFF) << 17 | static_cast<uint32_t>(code >> 8 & 7) << 25;
}

inline constexpr uint16_t kSuccess = 0x000;
inline constexpr uint16_t kInvalidOpcode = 0x001;
inline constexpr uint16_t kInvalidField = 0x002;
inline constexpr uint16_t kDataTransferError = 0x004;
inline constexpr uint16_t kInternalError = 0x006;
inline constexpr uint16_t kAbortRequested = 0x007;
inline constexpr uint16_t kAbortedQueueDeleted = 0x008;
inline constexpr uint16_t kInvalidNamespace = 0x00B;
inline constexpr uint16_t kInvalidSglSegment = 0x00D;
inline constexpr uint16_t kInvalidSglCount = 0x00E;
inline constexpr uint16_t kSglLengthInvalid = 0x00F;
inline constexpr uint16_t kSglTypeInvalid = 0x011;
inline constexpr uint16_t kInvalidPrpOffset = 0x013;
inline constexpr uint16_t kLbaOutOfRange = 0x080;
inline constexpr uint16_t kCapacityExceeded = 0x081;
inline constexpr uint16_t kNamespaceNotReady = 0x082;
inline constexpr uint16_t kWriteFault = 0x280;
inline constexpr uint16_t kUnrecoveredReadError = 0x281;
inline constexpr uint16_t kGuardCheckError = 0x282;
inline constexpr uint16_t kAccessDenied = 0x286;
inline constexpr uint16_t kInternalPathError = 0x300;

// Completions of a controller that is our own software carry our status whole, as a vendor-specific code.
TUTTI_HD constexpr uint16_t code_of_status(Status status) noexcept {
  return status == Status::Ok ? kSuccess : static_cast<uint16_t>(0x700 | static_cast<uint16_t>(status));
}
// How a command ended, in our terms.
TUTTI_HD constexpr Status status_of_code(uint16_t code) noexcept {
  if (code > 0x700 && code <= code_of_status(Status::BadState)) {
    return static_cast<Status>(code & 0xFF);
  }
  switch (code) {
    case kSuccess:
      return Status::Ok;
    case kAbortRequested:
    case kAbortedQueueDeleted:
      return Status::Cancelled;
    case kCapacityExceeded:
      return Status::NoSpace;
    case kNamespaceNotReady:
      return Status::Retry;
    case kGuardCheckError:
      return Status::ChecksumError;
    default:
      return Status::DeviceError;
  }
}

// --- controller registers and what Identify says ---

inline constexpr uint64_t kRegCap = 0x00;
inline constexpr uint64_t kRegVersion = 0x08;
inline constexpr uint64_t kRegConfiguration = 0x14;
inline constexpr uint64_t kRegStatus = 0x1C;
inline constexpr uint64_t kRegAdminQueues = 0x24;
inline constexpr uint64_t kRegAdminSq = 0x28;
inline constexpr uint64_t kRegAdminCq = 0x30;
inline constexpr uint32_t kStatusReady = 1U << 0;
inline constexpr uint32_t kStatusFatal = 1U << 1;

struct Capabilities {
  uint32_t largest_queue;    // entries
  uint32_t timeout_ms;       // for CC.EN to show in CSTS.RDY
  uint32_t doorbell_stride;  // bytes
  uint32_t least_page;       // bytes
};
constexpr Capabilities capabilities(uint64_t cap) noexcept {
  return {static_cast<uint32_t>(cap & 0xFFFF) + 1, static_cast<uint32_t>(cap >> 24 & 0xFF) * 500,
          4U << (cap >> 32 & 0xF), 4096U << (cap >> 48 & 0xF)};
}
// CC: enabled, 4 KiB pages, NVM command set, entry sizes 64 and 16.
constexpr uint32_t configuration(bool enable) noexcept { return (enable ? 1U : 0U) | 6U << 16 | 4U << 20; }
constexpr uint32_t admin_queue_attributes(uint32_t entries) noexcept { return (entries - 1) | (entries - 1) << 16; }

TUTTI_HD constexpr uint64_t sq_doorbell(uint16_t queue, uint32_t stride) noexcept {
  return 0x1000 + uint64_t{2} * queue * stride;
}
TUTTI_HD constexpr uint64_t cq_doorbell(uint16_t queue, uint32_t stride) noexcept {
  return 0x1000 + (uint64_t{2} * queue + 1) * stride;
}

enum class SglSupport : uint8_t { None = 0, AnyAlignment = 1, DwordAligned = 2 };

struct ControllerIdentity {
  uint32_t namespaces;
  uint64_t largest_transfer;  // bytes; 0 = no limit
  SglSupport sgl;
};
// `data`: the 4,096 bytes of Identify Controller. `least_page`: of Capabilities; MDTS counts in it.
constexpr ControllerIdentity parse_controller(const uint8_t* data, uint32_t least_page) noexcept {
  const auto word = [data](int at) {
    return static_cast<uint32_t>(data[at]) | static_cast<uint32_t>(data[at + 1]) << 8 |
           static_cast<uint32_t>(data[at + 2]) << 16 | static_cast<uint32_t>(data[at + 3]) << 24;
  };
  const uint32_t sgls = word(536) & 3;
  return {word(516), data[77] == 0 ? 0 : static_cast<uint64_t>(least_page) << data[77],
          sgls == 1 ? SglSupport::AnyAlignment : (sgls == 2 ? SglSupport::DwordAligned : SglSupport::None)};
}

struct NamespaceIdentity {
  uint64_t blocks;
  uint32_t block_bytes;
  uint32_t metadata_bytes;
};
constexpr NamespaceIdentity parse_namespace(const uint8_t* data) noexcept {
  uint64_t blocks = 0;
  for (int i = 7; i >= 0; --i) {
    blocks = blocks << 8 | data[i];
  }
  const int format = 128 + 4 * ((data[26] & 0xF) | (data[26] >> 5 & 3) << 4);  // FLBAS: the format's index in two parts
  return {blocks, 1U << data[format + 2],
          static_cast<uint32_t>(data[format]) | static_cast<uint32_t>(data[format + 1]) << 8};
}

}  // namespace tutti::nvme
