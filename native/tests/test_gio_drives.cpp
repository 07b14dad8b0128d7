// The ring on queue pairs of the userspace driver, over controllers in software: bytes, refusals, and what the host
// does for a pair whose commands are late. Runs under the sanitizers; the rig has the same on emulated drives.
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "nvme_model.h"
#include "tutti/checksum.h"
#include "tutti/gio/drive_controller.h"
#include "tutti/gio/queue.h"

using namespace tutti;
using namespace std::chrono_literals;
using tutti::testing::ModelController;

namespace {

constexpr uint32_t kObject = 12288;
constexpr uint32_t kObjects = 24;  // half of them on each drive
constexpr uint64_t kStride = kObject + 512;
constexpr uint32_t kIssuers = 2;

struct Shape {
  bool bounce = false;
  bool sgl = true;
  std::chrono::milliseconds command_timeout{20000};
};

struct Rig {
  std::shared_ptr<nvme::DmaSpace> space = nvme::DmaSpace::identity();
  std::shared_ptr<ModelController> models[2] = {std::make_shared<ModelController>(kObjects * kObject / 512),
                                                std::make_shared<ModelController>(kObjects * kObject / 512)};
  nvme::DmaMemory memory = space->allocate(kObjects * kStride, nvme::PageKind::Base4K);
  std::unique_ptr<gio::Accelerator> accelerator = gio::make_host_accelerator();
  std::unique_ptr<gio::Queue> queue;
  std::unique_ptr<gio::DriveController> drives;
  gio::QueueOptions options;
  std::vector<uint64_t> sums = std::vector<uint64_t>(kObjects);
  std::vector<uint8_t> statuses;
  std::vector<uint32_t> retired;

  explicit Rig(const Shape& shape = {}) {
    std::vector<std::unique_ptr<nvme::UserController>> controllers;
    for (const auto& model : models) {
      nvme::ControllerOptions made;
      made.pages = nvme::PageKind::Base4K;
      made.command_timeout = 500ms;
      made.allow_sgl = shape.sgl;
      controllers.push_back(std::make_unique<nvme::UserController>(model, space, made));
    }
    drives = std::make_unique<gio::DriveController>(std::move(controllers), space, kIssuers);
    options.depth = 4;
    options.blocks = 1;
    options.issuers_per_block = kIssuers;
    options.movers_per_block = 1;
    options.lanes = 4;
    options.pairs_per_issuer = 2;
    options.pairs = drives->pairs();
    options.payload_bytes = kObject;
    options.object_bytes = kObject;
    options.bounce = shape.bounce;
    options.command_timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(shape.command_timeout).count());
    queue = std::make_unique<gio::Queue>(*accelerator, options);
    if (shape.bounce) {
      const auto [first, end] = queue->slot_memory();
      queue->register_slots(drives->map(reinterpret_cast<void*>(first), end - first));
    } else {
      queue->register_range(drives->map(memory.at(), memory.bytes()));
    }
  }
  ~Rig() {
    CHECK(accelerator->drain(20'000));
    drives.reset();
  }

  uint8_t* object(uint32_t i) const { return memory.at() + i * kStride; }
  static uint8_t byte(uint32_t i, uint32_t at) { return static_cast<uint8_t>(i * 37 + at * 131 + at / 512); }

  Iocb* give(Direction direction) {
    Iocb* iocb = queue->get_iocb();
    CHECK(iocb != nullptr);
    iocb->header.direction = direction;
    iocb->header.num_ioctx = kObjects;
    for (uint32_t i = 0; i < kObjects; ++i) {
      iocb->contexts[i] = {reinterpret_cast<uint64_t>(object(i)), kObject,
                           uint64_t{i / 2} * kObject / 512,       kObject / 512 - 1,
                           static_cast<uint16_t>(i % 2),          static_cast<uint16_t>(i)};
      queue->sums(iocb->header.id)[i] = sums[i];
      queue->statuses(iocb->header.id)[i] = 0;
    }
    queue->issue({&iocb, 1});
    return iocb;
  }
  void answer_quarantine() {
    for (const uint32_t pair : queue->quarantined()) {
      for (const uint32_t free : drives->abort(pair)) {
        queue->retire(free);
        retired.push_back(free);
      }
    }
  }
  Status wait(Iocb* iocb, bool answer = true) {
    const auto until = std::chrono::steady_clock::now() + 60s;
    for (;;) {
      if (const auto cqe = queue->wait_cqe(iocb->header.id, 5ms)) {
        const uint32_t id = iocb->header.id;
        statuses.assign(queue->statuses(id), queue->statuses(id) + kObjects);
        if (iocb->header.direction == Direction::Write) {
          sums.assign(queue->sums(id), queue->sums(id) + kObjects);
        }
        queue->release(id);
        return static_cast<Status>(cqe->status);
      }
      if (answer) {
        answer_quarantine();
      }
      CHECK(std::chrono::steady_clock::now() < until);
    }
  }
  Status run(Direction direction) { return wait(give(direction)); }
  uint32_t count(Status status) const {
    uint32_t found = 0;
    for (const uint8_t one : statuses) {
      found += one == static_cast<uint8_t>(status) ? 1 : 0;
    }
    return found;
  }
  void store() {
    for (uint32_t i = 0; i < kObjects; ++i) {
      for (uint32_t at = 0; at < kObject; ++at) {
        object(i)[at] = byte(i, at);
      }
    }
    CHECK(run(Direction::Write) == Status::Ok);
  }
  void forget() { std::memset(memory.at(), 0xEE, memory.bytes()); }
  bool untouched() const {
    for (uint64_t at = 0; at < memory.bytes(); ++at) {
      if (memory.at()[at] != 0xEE) {
        return false;
      }
    }
    return true;
  }
};

void what_is_stored_comes_back(bool bounce, bool sgl) {
  Rig rig({bounce, sgl});
  rig.store();
  for (uint32_t i = 0; i < kObjects; ++i) {
    CHECK(rig.sums[i] == multilinear64(rig.object(i), kObject));
    CHECK(std::memcmp(rig.models[i % 2]->data().data() + uint64_t{i / 2} * kObject, rig.object(i), kObject) == 0);
  }
  for (int round = 0; round < 6; ++round) {  // the queues turn over
    rig.forget();
    CHECK(rig.run(Direction::Read) == Status::Ok);
    for (uint32_t i = 0; i < kObjects; ++i) {
      CHECK(rig.object(i)[0] == Rig::byte(i, 0) && rig.sums[i] == multilinear64(rig.object(i), kObject));
      CHECK(rig.object(i)[kObject] == 0xEE);
    }
  }
  rig.models[1]->data()[5 * kObject + 77] ^= 1;
  CHECK(rig.run(Direction::Read) == Status::ChecksumError);
  CHECK(rig.count(Status::ChecksumError) == 1 && rig.statuses[11] != 0 && rig.retired.empty());
}

// One drive takes commands and answers none: its pairs are deleted, the other drive's stay.
void late_commands_cost_their_pairs() {
  Rig rig({.command_timeout = 1000ms});
  rig.store();
  rig.models[1]->switches.hold_io = true;
  CHECK(rig.run(Direction::Read) != Status::Ok);
  CHECK(rig.count(Status::Timeout) >= 1);
  CHECK(rig.count(Status::Ok) + rig.count(Status::Timeout) + rig.count(Status::DeviceError) == kObjects);
  for (uint32_t i = 0; i < kObjects; i += 2) {
    CHECK(rig.statuses[i] != static_cast<uint8_t>(Status::Timeout));
  }
  for (const uint32_t pair : rig.retired) {
    CHECK(pair % 2 == 1);
  }
  CHECK(rig.queue->working_pairs() == 2 && rig.drives->drive(1).health() == nvme::Health::Ready);
  rig.models[1]->switches.hold_io = false;  // what was held is gone with the pairs
  rig.forget();
  CHECK(rig.run(Direction::Read) == Status::DeviceError && rig.count(Status::DeviceError) == kObjects);
  CHECK(rig.untouched());
}

// A drive that answers nothing, its admin queue included: reset, and none of its pairs works after one answer.
void a_mute_drive_is_reset() {
  Rig rig({.command_timeout = 1000ms});
  rig.store();
  rig.models[0]->switches.hold_io = true;
  rig.models[0]->switches.mute_admin = true;
  rig.forget();
  CHECK(rig.run(Direction::Write) != Status::Ok && rig.count(Status::Timeout) >= 1);
  CHECK(rig.drives->drive(0).health() == nvme::Health::Stopped && !rig.models[0]->bus_master());
  CHECK(rig.retired.size() >= 2 && rig.queue->working_pairs() == 2);
  CHECK(rig.run(Direction::Read) == Status::DeviceError && rig.count(Status::DeviceError) == kObjects);
}

// The answer comes after the deadline, and before the host has done anything: it counts.
void a_late_answer_counts() {
  Rig rig({.command_timeout = 1000ms});
  rig.store();
  rig.models[0]->switches.hold_io = true;
  Iocb* const iocb = rig.give(Direction::Read);
  const auto until = std::chrono::steady_clock::now() + 30s;
  while (rig.queue->quarantined().size() < kIssuers && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(rig.queue->quarantined().size() >= 1);
  rig.models[0]->switches.hold_io = false;
  CHECK(rig.wait(iocb, false) != Status::Ok);  // warps with a pair in quarantine take no more
  CHECK(rig.count(Status::Ok) >= 1 && rig.count(Status::Timeout) == 0);
  rig.answer_quarantine();
  CHECK(rig.retired.size() >= 1 && rig.drives->drive(0).health() == nvme::Health::Ready);
}

template <typename Change>
std::string refusal(Change change) {
  Rig rig;
  gio::QueueOptions options = rig.options;
  change(options);
  try {
    gio::Queue queue(*rig.accelerator, options);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

void what_does_not_fit_is_refused() {
  const auto says = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  CHECK(says(refusal([](auto& options) { options.pairs.pop_back(); }), "3 queue pairs were given"));
  CHECK(says(refusal([](auto& options) { options.pairs[1].entries = 32; }), "64 entries, not 32"));
  CHECK(says(refusal([](auto& options) { options.pairs[3].block_bytes = 4096; }), "blocks of 512 bytes, not 4096"));
  CHECK(says(refusal([](auto& options) { options.object_bytes = 256 << 10; }), "at most 131072"));
  Rig rig;
  gio::QueueOptions software = rig.options;
  software.pairs.clear();
  software.object_bytes = 4 << 20;
  software.pointer = nvme::DataPointer::Prp;
  gio::Queue queue(*rig.accelerator, software);
  try {
    queue.register_range(rig.drives->map(rig.memory.at(), rig.memory.bytes()));
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    CHECK(says(error.what(), "describes at most 2097152"));
  }
}

}  // namespace

int main() {
  for (const bool bounce : {true, false}) {
    for (const bool sgl : {true, false}) {
      what_is_stored_comes_back(bounce, sgl);
    }
  }
  late_commands_cost_their_pairs();
  a_mute_drive_is_reset();
  a_late_answer_counts();
  what_does_not_fit_is_refused();
  return 0;
}
