// The wire format by golden bytes, written out by hand from the specifications' figures, and the P2P table's
// arithmetic.
#include <array>
#include <cstring>
#include <vector>

#include "check.h"
#include "tutti/nvme/command.h"
#include "tutti/nvme/p2p_table.h"

namespace nvme = tutti::nvme;
using tutti::Status;

namespace {

template <typename T>
std::array<uint8_t, sizeof(T)> bytes_of(const T& value) {
  std::array<uint8_t, sizeof(T)> bytes{};
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

void read_with_sgl() {
  const auto entry = nvme::transfer_command(false, nvme::DataPointer::Sgl, 0x1234, 1, 0x0000'00A5'8765'4321, 128,
                                            nvme::sgl(nvme::kSglLastSegment, 0x0000'7F00'1122'3340, 16));
  constexpr std::array<uint8_t, 64> golden = {
      0x02, 0x40, 0x34, 0x12,                          // Read, PSDT 01b, identifier
      0x01, 0x00, 0x00, 0x00,                          // namespace
      0,    0,    0,    0,    0,    0,    0,    0,     // CDW2, CDW3
      0,    0,    0,    0,    0,    0,    0,    0,     // MPTR
      0x40, 0x33, 0x22, 0x11, 0x00, 0x7F, 0x00, 0x00,  // SGL1: address
      0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x30,  //       length, reserved, Last Segment
      0x21, 0x43, 0x65, 0x87, 0xA5, 0x00, 0x00, 0x00,  // SLBA
      0x7F, 0x00, 0x00, 0x00,                          // NLB, 0's based
      0,    0,    0,    0,    0,    0,    0,    0,    0, 0, 0, 0};
  CHECK(bytes_of(entry) == golden);
  CHECK(nvme::opcode_of(entry) == nvme::kOpRead && nvme::pointer_of(entry) == nvme::DataPointer::Sgl);
  CHECK(nvme::identifier_of(entry) == 0x1234 && nvme::lba_of(entry) == 0xA5'8765'4321 && nvme::blocks_of(entry) == 128);
}

void write_with_prp() {
  const auto entry = nvme::transfer_command(true, nvme::DataPointer::Prp, 0xFFFE, 7, 8, 65536, {0x1000, 0x2000});
  const auto bytes = bytes_of(entry);
  CHECK(bytes[0] == 0x01 && bytes[1] == 0x00 && bytes[2] == 0xFE && bytes[3] == 0xFF && bytes[4] == 7);
  CHECK(bytes[25] == 0x10 && bytes[33] == 0x20 && bytes[40] == 8 && bytes[48] == 0xFF && bytes[49] == 0xFF);
  CHECK(bytes[50] == 0 && bytes[51] == 0);
}

void admin_commands() {
  const auto cq = bytes_of(nvme::create_cq_command(1, 3, 1024, 0xABCD000));
  CHECK(cq[0] == 0x05 && cq[40] == 3 && cq[41] == 0 && cq[42] == 0xFF && cq[43] == 0x03 && cq[44] == 1 && cq[46] == 0);
  const auto sq = bytes_of(nvme::create_sq_command(2, 4, 64, 0xABCD000, 3));
  CHECK(sq[0] == 0x01 && sq[40] == 4 && sq[42] == 63 && sq[44] == 1 && sq[45] == 0 && sq[46] == 3 && sq[25] == 0xD0);
  const auto identify = bytes_of(nvme::identify_command(9, 1, 0, 0x10000));
  CHECK(identify[0] == 0x06 && identify[2] == 9 && identify[4] == 1 && identify[26] == 1 && identify[40] == 0);
  const auto queues = bytes_of(nvme::set_queues_command(1, 16));
  CHECK(queues[0] == 0x09 && queues[40] == 7 && queues[44] == 15 && queues[46] == 15);
  CHECK(nvme::granted_pairs(0x0007'000F) == 8);
  CHECK(bytes_of(nvme::delete_queue_command(1, true, 5))[0] == 0x00);
  CHECK(bytes_of(nvme::delete_queue_command(1, false, 5))[0] == 0x04);
}

void completions() {
  nvme::CompletionEntry entry{};
  const std::array<uint8_t, 16> golden = {0,    0,    0,    0,    0, 0, 0, 0,  // dw0, dw1
                                          0x05, 0x00, 0x02, 0x00,              // SQ head 5, SQ 2
                                          0x34, 0x12, 0x03, 0x05};             // identifier, phase 1, SC 81h, SCT 2
  std::memcpy(&entry, golden.data(), sizeof(entry));
  CHECK(nvme::identifier_of(entry) == 0x1234 && nvme::phase_of(entry) == 1);
  CHECK(nvme::code_of(entry) == nvme::kUnrecoveredReadError);
  CHECK(nvme::completion_word(0x1234, 1, nvme::kUnrecoveredReadError) == entry.status);
  CHECK(nvme::status_of_code(nvme::kSuccess) == Status::Ok);
  CHECK(nvme::status_of_code(nvme::kUnrecoveredReadError) == Status::DeviceError);
  CHECK(nvme::status_of_code(nvme::kInternalPathError) == Status::DeviceError);
  CHECK(nvme::status_of_code(nvme::kAbortRequested) == Status::Cancelled);
  CHECK(nvme::status_of_code(nvme::kCapacityExceeded) == Status::NoSpace);
  CHECK(nvme::status_of_code(nvme::kNamespaceNotReady) == Status::Retry);
  for (uint8_t status = 0; status <= static_cast<uint8_t>(Status::BadState); ++status) {
    CHECK(nvme::status_of_code(nvme::code_of_status(static_cast<Status>(status))) == static_cast<Status>(status));
  }
  for (uint32_t code = 1; code < 0x800; ++code) {  // no code of any class passes for success
    CHECK(nvme::status_of_code(static_cast<uint16_t>(code)) != Status::Ok);
  }
}

void registers_and_identify() {
  const auto cap = nvme::capabilities(0x0040'1820'0f01'07ff);  // what QEMU's controller says
  CHECK(cap.largest_queue == 2048 && cap.timeout_ms == 7500 && cap.doorbell_stride == 4 && cap.least_page == 4096);
  CHECK(nvme::sq_doorbell(1, 4) == 0x1008 && nvme::cq_doorbell(1, 4) == 0x100C && nvme::cq_doorbell(2, 16) == 0x1050);
  CHECK(nvme::configuration(true) == 0x0046'0001 && nvme::configuration(false) == 0x0046'0000);
  CHECK(nvme::admin_queue_attributes(64) == 0x003F'003F);
  std::array<uint8_t, 4096> page{};
  page[77] = 7;
  page[516] = 1;
  page[536] = 1;
  const auto controller = nvme::parse_controller(page.data(), 4096);
  CHECK(controller.largest_transfer == 512 << 10 && controller.namespaces == 1);
  CHECK(controller.sgl == nvme::SglSupport::AnyAlignment);
  page[536] = 2;
  CHECK(nvme::parse_controller(page.data(), 4096).sgl == nvme::SglSupport::DwordAligned);
  page[536] = 0;
  page[77] = 0;
  CHECK(nvme::parse_controller(page.data(), 4096).sgl == nvme::SglSupport::None);
  CHECK(nvme::parse_controller(page.data(), 4096).largest_transfer == 0);
  std::array<uint8_t, 4096> space{};
  space[0] = 0x00;
  space[2] = 0x02;      // 131,072 blocks
  space[26] = 1;        // second format
  space[128 + 6] = 12;  // of 4 KiB
  const auto found = nvme::parse_namespace(space.data());
  CHECK(found.blocks == 131072 && found.block_bytes == 4096 && found.metadata_bytes == 0);
}

struct Table {
  std::vector<nvme::DataDescriptor> entries;
  std::array<uint64_t, 512> page{};
  nvme::P2pRange range;
  nvme::ScratchPage scratch;
  explicit Table(uint64_t pages, uint32_t page_bytes) {
    for (uint64_t i = 0; i < pages; ++i) {  // pages in reverse: nothing may assume that they are neighbours
      entries.push_back(nvme::sgl(nvme::kSglDataBlock, 0x100'0000'0000 - (i + 1) * page_bytes, page_bytes));
    }
    range = {0x7000'0000, entries.data(), 0xE000'0000, pages, page_bytes};
    scratch = {page.data(), 0x5000};
  }
};

void sgl_forms() {
  Table table(16, 65536);
  const uint64_t base = table.range.base;
  // Inside one page: the descriptor inline.
  auto found = nvme::sgl_of(table.range, base + 65536 + 4096, 8192, table.scratch);
  CHECK(found.lo == table.entries[1].lo + 4096 && nvme::sgl_bytes(found) == 8192);
  CHECK(nvme::sgl_identifier(found) == nvme::kSglDataBlock);
  // One whole page: the table's own entry.
  found = nvme::sgl_of(table.range, base + 3 * 65536, 65536, table.scratch);
  CHECK(found.lo == table.entries[3].lo && found.hi == table.entries[3].hi);
  // Whole pages: a Last Segment into the table itself.
  found = nvme::sgl_of(table.range, base + 2 * 65536, 4 * 65536, table.scratch);
  CHECK(found.lo == 0xE000'0000 + 2 * 16 && nvme::sgl_bytes(found) == 64);
  CHECK(nvme::sgl_identifier(found) == nvme::kSglLastSegment);
  CHECK(table.page[0] == 0);
  // Anything else: a scratch segment whose lengths add up.
  found = nvme::sgl_of(table.range, base + 65536 - 512, 65536 + 1024, table.scratch);
  CHECK(found.lo == 0x5000 && nvme::sgl_bytes(found) == 48 && nvme::sgl_identifier(found) == nvme::kSglLastSegment);
  CHECK(table.page[0] == table.entries[0].lo + 65536 - 512 && table.page[1] == 512);
  CHECK(table.page[2] == table.entries[1].lo && table.page[3] == 65536);
  CHECK(table.page[4] == table.entries[2].lo && table.page[5] == 512);
  CHECK(nvme::inside(table.range, base + 15 * 65536, 65536) &&
        !nvme::inside(table.range, base + 15 * 65536 + 1, 65536));
  CHECK(!nvme::inside(table.range, base - 1, 1) && !nvme::inside(table.range, base, 0));
}

void prp_forms() {
  Table table(16, 65536);
  const uint64_t base = table.range.base;
  auto found = nvme::prp_of(table.range, base + 512, 1024, table.scratch);
  CHECK(found.lo == table.entries[0].lo + 512 && found.hi == 0);
  found = nvme::prp_of(table.range, base + 4096 - 512, 1024, table.scratch);
  CHECK(found.lo == table.entries[0].lo + 4096 - 512 && found.hi == table.entries[0].lo + 4096);
  CHECK(table.page[0] == 0);
  found = nvme::prp_of(table.range, base + 65536 - 4096, 3 * 4096, table.scratch);
  CHECK(found.lo == table.entries[0].lo + 65536 - 4096 && found.hi == 0x5000);
  CHECK(table.page[0] == table.entries[1].lo && table.page[1] == table.entries[1].lo + 4096 && table.page[2] == 0);
}

void arithmetic() {
  const uint64_t memory = uint64_t{60} << 30;
  const uint64_t pages = memory / 65536;
  CHECK(pages == 983'040 && pages * sizeof(nvme::DataDescriptor) == uint64_t{15} << 20);
  CHECK(pages * nvme::kPrpPageBytes == uint64_t{3840} << 20);  // one list page per 64 KiB page: 3.75 GiB
  CHECK(1024ULL * nvme::kPrpPageBytes == 4ULL << 20);          // one per queue slot, depth 1,024
  CHECK(nvme::largest_described(nvme::DataPointer::Prp, 65536) == 2 << 20);
}

}  // namespace

int main() {
  read_with_sgl();
  write_with_prp();
  admin_commands();
  completions();
  registers_and_identify();
  sgl_forms();
  prp_forms();
  arithmetic();
  return 0;
}
