#include "tutti/plan.h"

#include <algorithm>
#include <utility>

namespace tutti {

Plan::Plan(Direction direction_in, const Layout& layout, std::vector<uint32_t> slots_in,
           std::vector<uint32_t> generations_in, std::vector<uint8_t> rots_in, std::vector<uint32_t> engine_blocks_in,
           Clock::time_point deadline_in)
    : direction(direction_in),
      objects(layout.objects),
      kv_factor(layout.kv_factor),
      slots(std::move(slots_in)),
      generations(std::move(generations_in)),
      rots(std::move(rots_in)),
      engine_blocks(std::move(engine_blocks_in)),
      deadline(deadline_in),
      groups_(direction_in == Direction::Read ? read_groups(layout) : std::vector<Group>{}),
      status_(std::make_unique<std::atomic<uint8_t>[]>(slots.size())),
      layer_left_(std::make_unique<std::atomic<uint32_t>[]>(layout.layers())),
      items_left_(static_cast<uint64_t>(slots.size()) * layout.objects) {
  for (uint32_t layer = 0; layer < layout.layers(); ++layer) {
    layer_left_[layer].store(blocks() * kv_factor, std::memory_order_relaxed);
  }
  if (slots.empty()) {
    duration_ns_.store(0);
  }
}

std::vector<Plan::Group> Plan::read_groups(const Layout& layout) {
  const uint64_t run = std::max<uint64_t>(kRunBytes / std::max<uint64_t>(layout.object_bytes, 1), 1);
  const uint64_t widest = std::max<uint64_t>(run == 1 ? 1 : run * layout.devices(), layout.kv_factor);
  std::vector<Group> groups;
  groups.reserve(layout.objects);
  for (uint64_t width = layout.kv_factor; groups.size() < layout.objects; width = std::min(2 * width, widest)) {
    const auto first = static_cast<uint32_t>(groups.size());
    const auto taken = static_cast<uint32_t>(std::min<uint64_t>(width, layout.objects - first));
    groups.insert(groups.end(), taken, Group{first, taken});
  }
  return groups;
}

void Plan::object_done(Item item, Status status) noexcept {
  if (status != Status::Ok) {
    fail_block(item.block, status);
  }
  const bool layer_last = layer_left_[item.object / kv_factor].fetch_sub(1, std::memory_order_acq_rel) == 1;
  const bool last = items_left_.fetch_sub(1, std::memory_order_acq_rel) == 1;
  if (last) {
    int64_t unset = -1;
    duration_ns_.compare_exchange_strong(unset, (Clock::now() - submitted_).count());
  }
  if (layer_last || last) {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
}

void Plan::fail_block(uint32_t block, Status status) noexcept {
  auto ok = static_cast<uint8_t>(Status::Ok);
  status_[block].compare_exchange_strong(ok, static_cast<uint8_t>(status), std::memory_order_acq_rel);
}

void Plan::end_early(Status status) noexcept {
  const std::lock_guard lock(mutex_);
  if (drained() || ended_early()) {
    return;
  }
  for (uint32_t block = 0; block < blocks(); ++block) {
    fail_block(block,
               status);  // which blocks were whole isn't tracked per block: the caller asked for all of them in time
  }
  int64_t unset = -1;
  duration_ns_.compare_exchange_strong(unset, (Clock::now() - submitted_).count());
  ended_.store(true, std::memory_order_release);
  changed_.notify_all();
}

template <typename Reached>
bool Plan::wait_for(Clock::time_point until, Reached reached) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (reached()) {
      return true;
    }
    const auto now = Clock::now();
    if (now >= deadline && !ended_early()) {
      lock.unlock();
      end_early(Status::Timeout);
      lock.lock();
      continue;
    }
    if (now >= until) {
      return false;
    }
    const auto wake = ended_early() ? until : std::min(until, deadline);
    if (wake == Clock::time_point::max()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, wake);
    }
  }
}

bool Plan::wait(Clock::time_point until) {
  return wait_for(until, [this] { return done(); });
}

bool Plan::wait_layer(uint32_t layer, Clock::time_point until) {
  return wait_for(until, [this, layer] { return layer_done(layer); });
}

bool Plan::wait_drained(Clock::time_point until) {
  return wait_for(until, [this] { return drained(); });
}

std::vector<uint8_t> Plan::statuses() const {
  std::vector<uint8_t> result(blocks());
  for (uint32_t block = 0; block < blocks(); ++block) {
    result[block] = status_[block].load(std::memory_order_acquire);
  }
  return result;
}

double Plan::seconds() const noexcept {
  const int64_t ns = duration_ns_.load(std::memory_order_acquire);
  return static_cast<double>(ns >= 0 ? ns : (Clock::now() - submitted_).count()) * 1e-9;
}

}  // namespace tutti
