// The ring on drives: bytes in every form, and what becomes of its commands when a drive or a queue doesn't answer.
#include <algorithm>
#include <cstring>
#include <set>
#include <thread>

#include "ring.h"
#include "tutti/checksum.h"

namespace rig {
namespace {

constexpr auto kSettled = std::chrono::milliseconds(1000 * 24 / kSlowPerSecond);  // as in lifecycle.cpp

// What the commands in the drives' own submission queues were.
void check_commands(Ring& ring, const Shape& shape) {
  std::vector<uint32_t> commands(ring.drives->drives());
  const auto& pairs = ring.drives->pairs();
  std::set<std::string> forms;
  for (size_t pair = 0; pair < pairs.size(); ++pair) {
    const size_t device = pair % commands.size();
    CHECK((pairs[pair].pointer == nvme::DataPointer::Sgl) == shape.sgl[device]);
    for (uint32_t i = 0; i < pairs[pair].entries && pairs[pair].sq[i].cdw0 != 0; ++i) {
      const nvme::SubmissionEntry& entry = pairs[pair].sq[i];
      CHECK(nvme::pointer_of(entry) == pairs[pair].pointer && entry.nsid == 1);
      const uint64_t scratch = pairs[pair].scratch[nvme::identifier_of(entry)].address;
      const bool sgl = pairs[pair].pointer == nvme::DataPointer::Sgl;
      forms.insert((sgl ? entry.dptr_lo : entry.dptr_hi) == scratch ? "scratch" : "other");
      ++commands[device];
    }
  }
  uint32_t all = 0;
  for (const uint32_t number : commands) {
    CHECK(number != 0);
    all += number;
  }
  CHECK(all == 2 * kObjects);
  CHECK(forms.contains("scratch") || (shape.bounce && shape.sgl[0]));  // slots may be whole pages of the table
}

Case bytes(const char* name, const Shape& shape) {
  return {name,
          [shape](const Context& context) {
            Ring ring(context, shape);
            CHECK(shape.bounce == (ring.queue->slot_memory().second != 0));
            ring.there_and_back();
            check_commands(ring, shape);
          },
          [shape](const Context& context) { ring_by_kernel(context, shape.drives, shape.area, shape.payload_bytes); }};
}

// Bytes that somebody else has written over an object are noticed, for that object alone.
void checksum_mismatch(const Context& context, uint64_t area) {
  Shape shape;
  shape.drives = {"0", "1"};
  shape.area = area;
  Ring ring(context, shape);
  ring.there_and_back();
  const auto place = ring.address(11);
  {
    const auto memory = ring.space->allocate(4096, nvme::PageKind::Base4K);
    const nvme::MemoryTable table(ring.space, memory.region(), 4096);
    auto& drive = ring.drives->drive(place.device);
    nvme::QueueIssuer issuer(drive.create_queue_pair(8));
    std::memset(memory.at(), 0x11, kBlock);
    run_one(issuer, {nvme::kOpWrite, (place.offset + 40 * kBlock) / kBlock, 1, &table.range(), table.range().base});
    drive.delete_queue_pair(issuer.pair().id);
  }
  ring.forget();
  CHECK(ring.run(Direction::Read, 0, kObjects).status == static_cast<uint32_t>(Status::ChecksumError));
  CHECK(ring.statuses[11] == static_cast<uint8_t>(Status::ChecksumError) && ring.count(Status::Ok) == kObjects - 1);
  for (uint32_t i = 0; i < kObjects; ++i) {
    CHECK(i == 11 || ring.holds(i));
  }
}

// Sums of what the kernel has written where the objects lie.
void expect_pattern(Ring& ring, const Shape& shape) {
  std::vector<uint8_t> bytes(kObjectBytes);
  for (uint32_t i = 0; i < kObjects; ++i) {
    const auto place = ring.address(i);
    fill(bytes.data(), kObjectBytes, salt_of("rig-nvme-" + shape.drives[place.device]), place.offset);
    ring.sums[i] = tutti::multilinear64(bytes.data(), kObjectBytes);
  }
}
// Whatever ended Ok is what the kernel has written.
void check_pattern(const Ring& ring, const Shape& shape) {
  for (uint32_t i = 0; i < ring.statuses.size(); ++i) {
    const auto place = ring.address(i);
    CHECK(ring.statuses[i] != 0 ||
          matches(ring.object(i), kObjectBytes, salt_of("rig-nvme-" + shape.drives[place.device]), place.offset));
  }
}

// An object that holds a block which the drive can't read fails alone.
void medium_error(const Context& context) {
  Shape shape;
  shape.drives = {"bad"};
  shape.area = 512 * kKiB;
  Ring ring(context, shape);
  expect_pattern(ring, shape);
  const auto bad = static_cast<uint32_t>((kBadBlock * kBlock - shape.area) / kObjectBytes);
  constexpr uint32_t kRead = 12;  // of the 2 MiB that the kernel has written
  CHECK(ring.run(Direction::Read, 0, kRead).status == static_cast<uint32_t>(Status::DeviceError));
  CHECK(ring.statuses[bad] == static_cast<uint8_t>(Status::DeviceError) && ring.count(Status::Ok) == kRead - 1);
  check_pattern(ring, shape);
  CHECK(ring.retired.empty());
}

// A fresh pair of the drive reads what the kernel has written. Returns its identifier.
uint16_t works_again(Ring& ring, uint32_t device, const std::string& name) {
  const auto memory = ring.space->allocate(4096, nvme::PageKind::Base4K);
  const nvme::MemoryTable table(ring.space, memory.region(), 4096);
  nvme::QueueIssuer issuer(ring.drives->drive(device).create_queue_pair(8));
  run_one(issuer, {nvme::kOpRead, 0, 8, &table.range(), table.range().base});
  CHECK(matches(memory.at(), 4096, salt_of(name), 0));
  return issuer.pair().id;
}

void everything_ends_at_once(Ring& ring) {
  const auto start = Clock::now();
  CHECK(ring.run(Direction::Read, 0, kObjects).status == static_cast<uint32_t>(Status::DeviceError));
  CHECK(ring.count(Status::DeviceError) == kObjects && Clock::now() - start < std::chrono::seconds(3));
}

void nothing_arrives(Ring& ring) {
  ring.forget();
  std::this_thread::sleep_for(kSettled);
  CHECK(all_equal(ring.object(0), kObjects * kStride, 0xEE));
}

// Commands that get lost on their way cost their pair: it is deleted, and the other warp does the rest.
void lost_commands(const Context& context, uint64_t area) {
  Shape shape;
  shape.area = area;
  std::vector<uint64_t> sums;
  {
    Ring whole(context, shape);
    whole.there_and_back();
    sums = whole.sums;
  }
  shape.deaf_pair = 0;
  shape.command_timeout = std::chrono::milliseconds(2500);
  Ring ring(context, shape);
  ring.sums = sums;
  while (ring.run(Direction::Read, 0, kObjects).status == 0) {  // until the deaf pair's warp takes a part
  }
  const uint32_t late = ring.count(Status::Timeout);
  CHECK(late >= 1 && late <= 8 && ring.count(Status::Ok) == kObjects - late);  // at most what the warp has in flight
  CHECK(ring.retired == std::vector<uint32_t>{0} && ring.queue->working_pairs() == 1);
  CHECK(ring.drives->drive(0).health() == nvme::Health::Ready);
  ring.forget();
  CHECK(ring.run(Direction::Read, 0, kObjects).status == 0);
  for (uint32_t i = 0; i < kObjects; ++i) {
    CHECK(ring.holds(i));
  }
  CHECK(works_again(ring, 0, "rig-nvme-0") == ring.drives->pairs()[0].id);  // in the place of the deleted one
}

// A drive that is too slow: each warp's pair is deleted, without a reset, and nothing arrives any more. (Deleting a
// pair makes the emulated drive complete what it has, so that late commands may still end Ok.)
void too_slow(const Context& context) {
  Shape shape;
  shape.drives = {"slow"};
  shape.area = 0;
  shape.command_timeout = std::chrono::milliseconds(60);
  Ring ring(context, shape);
  expect_pattern(ring, shape);
  while (ring.queue->working_pairs() != 0) {  // a warp that had nothing late goes on
    ring.run(Direction::Read, 0, kObjects);
    CHECK(ring.count(Status::Ok) + ring.count(Status::Timeout) + ring.count(Status::DeviceError) == kObjects);
    check_pattern(ring, shape);
  }
  CHECK(ring.retired.size() == kIssuers);
  CHECK(ring.drives->drive(0).health() == nvme::Health::Ready);
  nothing_arrives(ring);
  everything_ends_at_once(ring);
  works_again(ring, 0, "rig-nvme-slow");
}

// One of two drives is reset with commands in flight: they end as errors, those of the other drive as they would.
void reset_in_flight(const Context& context) {
  Shape shape;
  shape.drives = {"0", "slow"};
  shape.area = 0;
  shape.command_timeout = std::chrono::milliseconds(2000);
  Ring ring(context, shape);
  expect_pattern(ring, shape);
  tutti::Iocb* const iocb = ring.give(Direction::Read, 0, kObjects);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // two of the slow drive's
  ring.drives->drive(1).stop();
  CHECK(ring.wait(iocb).status != 0 && ring.count(Status::Timeout) >= 1);
  CHECK(ring.count(Status::Ok) + ring.count(Status::Timeout) + ring.count(Status::DeviceError) == kObjects);
  check_pattern(ring, shape);
  for (uint32_t i = 0; i < kObjects; ++i) {
    CHECK(ring.address(i).device == 1 || ring.statuses[i] != static_cast<uint8_t>(Status::Timeout));
  }
  std::sort(ring.retired.begin(), ring.retired.end());
  CHECK(ring.retired == (std::vector<uint32_t>{1, 3}));  // of the drive that was reset
  CHECK(ring.queue->working_pairs() == kIssuers && ring.drives->drive(0).health() == nvme::Health::Ready);
  nothing_arrives(ring);
  everything_ends_at_once(ring);
  works_again(ring, 0, "rig-nvme-0");
}

// A drive that answers nothing at all, its admin queue included, is reset; all its pairs are given up with one answer.
void mute_drive(const Context& context) {
  Shape shape;
  shape.area = 0;
  shape.command_timeout = std::chrono::milliseconds(300);
  shape.admin_timeout = std::chrono::milliseconds(1000);
  Ring ring(context, shape);
  ring.devices[0]->set_bus_master(false);
  const tutti::Cqe cqe = ring.run(Direction::Read, 0, kObjects);
  CHECK(cqe.status != 0 && ring.count(Status::Timeout) >= 1);
  CHECK(ring.count(Status::Timeout) + ring.count(Status::DeviceError) == kObjects);
  CHECK(ring.retired == (std::vector<uint32_t>{0, 1}) && ring.queue->working_pairs() == 0);
  CHECK(ring.drives->drive(0).health() == nvme::Health::Stopped);
  CHECK(all_equal(ring.object(0), kObjects * kStride, 0xEE));
  nothing_arrives(ring);
  everything_ends_at_once(ring);
  CHECK(ring.accelerator->drain(20000));  // no warp polls the old pairs any more
  ring.drives->drive(0).start();
  works_again(ring, 0, "rig-nvme-0");
}

uint64_t area(uint64_t number) { return kRingArea + number * kRingStep; }

}  // namespace

std::vector<Case> ring_cases() {
  const std::vector<std::string> one = {"0"};
  const std::vector<std::string> two = {"0", "1"};
  const std::vector<bool> sgl = {true, true};
  const std::vector<bool> prp = {false, false};
  return {
      bytes("ring_bounce_sgl", {one, true, sgl, false, area(0), kObjectBytes - 104}),
      bytes("ring_bounce_prp", {one, true, prp, false, area(1), kObjectBytes - 104}),
      bytes("ring_direct_sgl", {one, false, sgl, false, area(2)}),
      bytes("ring_direct_prp", {one, false, prp, false, area(3)}),
      bytes("ring_two_drives_bounce_sgl", {two, true, sgl, false, area(4)}),
      bytes("ring_two_drives_bounce_prp", {two, true, prp, false, area(5)}),
      bytes("ring_two_drives_direct_sgl", {two, false, sgl, false, area(6)}),
      bytes("ring_two_drives_direct_prp", {two, false, prp, false, area(7)}),
      bytes("ring_two_drives_sgl_and_prp", {two, false, {true, false}, false, area(8)}),
      bytes("ring_peer_to_peer_sgl", {two, false, sgl, true, area(9)}),
      bytes("ring_peer_to_peer_prp", {two, false, prp, true, area(10)}),
      {"ring_checksum_mismatch", [](const Context& context) { checksum_mismatch(context, area(11)); }, {}},
      {"ring_medium_error", medium_error, {}},
      {"ring_lost_commands", [](const Context& context) { lost_commands(context, area(12)); }, {}},
      {"ring_too_slow", too_slow, {}},
      {"ring_reset_in_flight", reset_in_flight, {}},
      {"ring_mute_drive", mute_drive, {}},
  };
}

}  // namespace rig
