// The issuing warps: one thread per command in flight, a private queue pair per warp, no lock anywhere. A warp takes
// contexts from the ring of IOCBs, writes NVMe commands for them, rings one doorbell per batch, polls for completions,
// hands objects to the moving warps and completes IOCBs. The same source runs on GPU warps and on threads.
//
// A read is Ready -> InFlight -> Moving -> Ended, a write Moving -> Ready -> InFlight -> Ended; with `bounce` moving is
// the copy between slot and engine memory, without it the checksum alone. Invariants: every context taken ends exactly
// once; an IOCB's completion is posted after all bytes of its contexts are where they belong; a warp leaves with none
// in flight; a command that outlasts its time ends only when the host has said that no device can touch its memory, or
// when the device has answered after all; a doorbell isn't rung any more once quarantine was asked for, so that the
// host may delete the pair. Source: Tutti (arXiv 2605.03375), GPU io_uring.
#pragma once

#include "tutti/gio/mover.h"

namespace tutti::gio {

enum class Stage : uint8_t { Free = 0, Ready = 1, InFlight = 2, Moving = 3, Ended = 4, Quarantined = 5 };

// One command slot: a lane's registers.
struct Command {
  Stage stage = Stage::Free;
  Status status = Status::Ok;
  bool write = false;
  uint16_t iocb = 0;
  uint16_t context = 0;
  uint16_t contexts = 0;  // of the IOCB
  uint16_t device = 0;
  uint16_t range = 0;
  uint64_t lba = 0;
  uint64_t memory = 0;
  uint64_t sum = 0;  // that a read must have
  uint64_t deadline_ns = 0;
};

template <typename Warp>
class Issuer {
 public:
  TUTTI_HD Issuer(Warp& warp, const RingView& ring, const IssuerQueues& queues, const IssueOptions& options,
                  BlockShared& shared, uint32_t index_in_block) noexcept
      : warp_(warp),
        ring_(ring),
        queues_(queues),
        options_(options),
        shared_(shared),
        first_job_(index_in_block * kLanes),
        segments_(segments_of(options.payload_bytes)) {}

  TUTTI_HD void run() noexcept {
    uint64_t last_work = warp_.now();
    for (;;) {
      poll_jobs();
      poll_completions();
      const bool claimed = claim();
      submit();
      end();
      const bool busy = claimed || count([](const Command& c) { return c.stage != Stage::Free; }) != 0;
      const uint64_t now = warp_.now();
      if (busy) {
        last_work = now;
        warp_.relax();
      } else if (now - last_work >= options_.linger_ns && may_leave()) {
        return;
      } else {
        warp_.pause();
      }
    }
  }

 private:
  // Warps leave together: one that left while others work would be missed until the whole kernel has ended, as the next
  // one begins only then. The first that finds nothing outstanding closes the kernel; nobody takes anything more then,
  // and what the host issues meanwhile is the next kernel's.
  TUTTI_HD bool may_leave() noexcept {
    if (closing() || !able_) {
      return true;
    }
    return warp_.once([&] {
      const uint32_t before = gpu_load(ring_.closing);
      return static_cast<uint32_t>(gpu_load(ring_.completion_tail) == load_acquire(ring_.submitted_tail) &&
                                   gpu_compare_exchange(ring_.closing, before, options_.kernel));
    }) != 0;
  }
  TUTTI_HD bool closing() noexcept {
    return warp_.once([&] { return static_cast<uint32_t>(gpu_load(ring_.closing) == options_.kernel); }) != 0;
  }

  template <typename Predicate>
  TUTTI_HD uint32_t mask(Predicate predicate) noexcept {
    return warp_.ballot([&](uint32_t lane) { return predicate(commands_[lane]); });
  }
  template <typename Predicate>
  TUTTI_HD uint32_t count(Predicate predicate) noexcept {
    return warp_.population(mask(predicate));
  }

  TUTTI_HD uint64_t slot_of(uint32_t lane) const noexcept {
    return reinterpret_cast<uint64_t>(queues_.slots) + static_cast<uint64_t>(lane) * options_.object_bytes;
  }
  TUTTI_HD uint64_t& sum_of(const Command& c) const noexcept {
    return ring_.sums[static_cast<uint64_t>(c.iocb) * kIoctxPerIocb + c.context];
  }

  // --- moving ---

  TUTTI_HD void begin_move(uint32_t lane, Command& c) noexcept {
    c.stage = Stage::Moving;
    uint64_t source = c.memory;
    uint64_t target = 0;
    if (options_.bounce) {
      source = c.write ? c.memory : slot_of(lane);
      target = c.write ? slot_of(lane) : c.memory;
    }
    publish_job(shared_, first_job_ + lane, source, target, segments_);
  }

  TUTTI_HD void poll_jobs() noexcept {
    if (mask([](const Command& c) { return c.stage == Stage::Moving; }) == 0) {
      return;
    }
    warp_.each([&](uint32_t lane) {
      Command& c = commands_[lane];
      if (c.stage != Stage::Moving) {
        return;
      }
      const Job& job = shared_.jobs[first_job_ + lane];
      if (block_load(&job.done) == 0) {
        return;
      }
      const uint64_t sum = checksum_mix(job.sum + options_.payload_bytes * kChecksumLength);
      if (c.write) {
        sum_of(c) = sum;
        c.stage = Stage::Ready;
      } else {
        c.status = sum == c.sum ? Status::Ok : Status::ChecksumError;
        c.stage = Stage::Ended;
      }
    });
  }

  // --- completions ---

  TUTTI_HD void poll_completions() noexcept {
    const uint32_t waiting =
        mask([](const Command& c) { return c.stage == Stage::InFlight || c.stage == Stage::Quarantined; });
    if (waiting == 0) {
      return;
    }
    // The next entry of each queue first, and those behind it only when it has come: empty looks at whole windows would
    // take several percent of what PCIe moves.
    const uint32_t pairs = options_.pairs_per_issuer;
    const uint32_t window = kLanes / pairs;  // entries of each queue that are looked at together
    uint32_t arrived = look(window, [&](uint32_t lane) { return lane % window == 0; });
    if (arrived != 0 && warp_.population(waiting) > 1) {
      const uint32_t heads = arrived;
      arrived = look(window, [&](uint32_t lane) { return (heads >> (lane / window * window) & 1) != 0; });
    }
    for (uint32_t pair = 0; pair < pairs; ++pair) {
      const uint32_t here = arrived >> pair * window & (window == 32 ? ~0U : (1U << window) - 1);
      const uint32_t in_order = warp_.trailing_ones(here);
      if (in_order == 0) {
        continue;
      }
      warp_.each([&](uint32_t lane) {
        if (lane < pair * window || lane >= pair * window + in_order) {
          return;
        }
        nvme::CompletionEntry entry{};
        entry.status = found_[lane];
        block_store(&shared_.codes[first_job_ + nvme::identifier_of(entry) % kLanes], 1U << 16 | nvme::code_of(entry));
      });
      warp_.single([&] {
        IssuerPair& queue = queues_.pairs[pair];
        const uint32_t head = queue.head + in_order;
        queue.phase ^= head >= kQueueEntries ? 1U : 0U;
        queue.head = head % kQueueEntries;
        if (!broken(pair)) {
          nvme::ring_doorbell(queue.cq_doorbell, queue.head);
        }
      });
    }
    const uint64_t now = warp_.now();
    warp_.each([&](uint32_t lane) {
      Command& c = commands_[lane];
      if (c.stage != Stage::InFlight && c.stage != Stage::Quarantined) {
        return;
      }
      uint32_t& code = shared_.codes[first_job_ + lane];
      const uint32_t word = block_load(&code);
      if (word != 0) {
        block_store(&code, 0);
        c.status = nvme::status_of_code(static_cast<uint16_t>(word & 0xFFFF));
        if (c.status == Status::Ok && !c.write) {
          begin_move(lane, c);
        } else {
          // A pair that is being deleted completes what it had with a status of its own.
          c.status = c.status == Status::Ok || !broken(pair_of(c)) ? c.status : lost(c);
          c.stage = Stage::Ended;
        }
      } else if (c.stage == Stage::InFlight && now >= c.deadline_ns) {
        c.stage = Stage::Quarantined;
        uint32_t* state = queues_.pairs[pair_of(c)].state;
        if (load_acquire(state) == static_cast<uint32_t>(PairState::Working)) {
          store_release(state, static_cast<uint32_t>(PairState::Quarantine));
        }
      } else if (broken(pair_of(c)) &&
                 load_acquire(queues_.pairs[pair_of(c)].state) == static_cast<uint32_t>(PairState::Retired)) {
        c.status = lost(c);
        c.stage = Stage::Ended;
      }
    });
    for (uint32_t late = mask([](const Command& c) { return c.stage == Stage::Quarantined; }); late != 0;
         late &= late - 1) {
      broken_ |= 1U << warp_.from(warp_.trailing_ones(~late), [&](uint32_t lane) { return pair_of(commands_[lane]); });
    }
  }

  // Lanes whose completion entry, of those that are `wanted`, has arrived; its status word is in `found_` then.
  template <typename Wanted>
  TUTTI_HD uint32_t look(uint32_t window, Wanted wanted) noexcept {
    return warp_.ballot([&](uint32_t lane) {
      const uint32_t pair = lane / window;
      if (pair >= options_.pairs_per_issuer || !wanted(lane)) {
        return false;
      }
      const IssuerPair& queue = queues_.pairs[pair];
      const uint32_t at = queue.head + lane % window;
      const uint32_t phase = at >= kQueueEntries ? queue.phase ^ 1 : queue.phase;
      const uint32_t word = nvme::load_completion(&queue.cq[at % kQueueEntries]);
      found_[lane] = word;
      return (word >> 16 & 1) == phase;
    });
  }

  TUTTI_HD uint32_t pair_of(const Command& c) const noexcept { return c.device % options_.pairs_per_issuer; }
  TUTTI_HD bool broken(uint32_t pair) const noexcept { return (broken_ >> pair & 1) != 0; }
  // How a command ends whose pair was given up: for its own lateness, or for that of another.
  TUTTI_HD static Status lost(const Command& c) noexcept {
    return c.stage == Stage::Quarantined ? Status::Timeout : Status::DeviceError;
  }

  // --- taking contexts ---

  // Whether all pairs of this warp work, as of a short while ago: each look crosses PCIe. A warp with a broken pair
  // takes nothing more: the others do its part.
  TUTTI_HD bool able() noexcept {
    const uint64_t now = warp_.now();
    if (!able_ || (broken_ == 0 && now < next_look_ns_)) {
      return able_;
    }
    next_look_ns_ = now + kLookNs;
    broken_ |= warp_.ballot([&](uint32_t lane) {
      return lane < options_.pairs_per_issuer &&
             load_acquire(queues_.pairs[lane].state) != static_cast<uint32_t>(PairState::Working);
    });
    if (broken_ != 0) {
      able_ = false;
      last_ = warp_.once([&] { return gpu_fetch_add(ring_.unable, 1); }) + 1 == options_.issuers;
    }
    return able_;
  }

  TUTTI_HD bool claim() noexcept {
    const uint32_t free =
        warp_.ballot([&](uint32_t lane) { return lane < options_.lanes && commands_[lane].stage == Stage::Free; });
    if ((!able() && !last_) || free == 0 || closing()) {
      return false;
    }
    const uint64_t taken = warp_.once([&] { return take(warp_.population(free)); });
    const auto number = static_cast<uint32_t>(taken >> 48);
    if (number == 0) {
      return false;
    }
    const auto first = static_cast<uint16_t>(taken >> 32);
    const auto iocb = static_cast<uint16_t>(taken >> 16);
    const auto contexts = static_cast<uint16_t>(taken);
    const IocbHeader& header = ring_.iocbs[iocb].header;
    warp_.each([&](uint32_t lane) {
      const uint32_t rank = warp_.population(free & ((1U << lane) - 1));
      if ((free >> lane & 1) == 0 || rank >= number) {
        return;
      }
      Command& c = commands_[lane];
      c.iocb = iocb;
      c.contexts = contexts;
      c.context = static_cast<uint16_t>(first + rank);
      // All that the command needs from the host in one trip: under load each costs many microseconds.
      const Ioctx context = ring_.iocbs[iocb].contexts[c.context];
      const uint32_t cancelled = load_relaxed(&header.cancelled);
      c.sum = sum_of(c);
      c.write = header.direction == Direction::Write;
      c.status = Status::Ok;
      c.memory = context.descriptor_lo;
      c.range = static_cast<uint16_t>(context.descriptor_hi >> 32);
      c.lba = context.lba;
      c.device = context.device;
      if (cancelled != 0) {
        c.status = Status::Cancelled;
        c.stage = Stage::Ended;
      } else if (!able_) {  // the last warp, with nothing left that works
        c.status = Status::DeviceError;
        c.stage = Stage::Ended;
      } else if (c.memory == 0) {
        c.stage = Stage::Ended;
      } else if (c.write) {
        begin_move(lane, c);
      } else {
        c.stage = Stage::Ready;
      }
    });
    return true;
  }

  // number << 48 | first context << 32 | iocb << 16 | contexts; 0 when there is nothing.
  TUTTI_HD uint64_t take(uint32_t wanted) noexcept {
    for (;;) {
      const uint64_t cursor = gpu_load(ring_.cursor);
      const auto position = static_cast<uint32_t>(cursor >> 32);
      const auto next = static_cast<uint32_t>(cursor);
      if (cached_position_ != position || cached_cell_ == 0) {
        if (load_acquire(ring_.submitted_tail) == position) {
          return 0;
        }
        cached_cell_ = load_relaxed(&ring_.submitted[position % ring_.depth]);
        cached_position_ = position;
      }
      const uint32_t contexts = cached_cell_ & 0xFFFF;
      const uint32_t left = contexts - next;
      const uint32_t number = left < wanted ? left : wanted;
      const uint64_t after = number == left ? static_cast<uint64_t>(position + 1) << 32 : cursor + number;
      if (gpu_compare_exchange(ring_.cursor, cursor, after)) {
        return static_cast<uint64_t>(number) << 48 | static_cast<uint64_t>(next) << 32 |
               static_cast<uint64_t>(cached_cell_ >> 16) << 16 | contexts;
      }
    }
  }

  // --- submitting ---

  TUTTI_HD void submit() noexcept {
    const uint32_t ready = mask([](const Command& c) { return c.stage == Stage::Ready; });
    if (ready == 0) {
      return;
    }
    const uint64_t deadline = warp_.now() + options_.command_timeout_ns;
    for (uint32_t pair = 0; pair < options_.pairs_per_issuer; ++pair) {
      const uint32_t mine =
          warp_.ballot([&](uint32_t lane) { return (ready >> lane & 1) != 0 && pair_of(commands_[lane]) == pair; });
      if (mine == 0) {
        continue;
      }
      if (broken(pair)) {  // a write that was moved meanwhile
        warp_.each([&](uint32_t lane) {
          if ((mine >> lane & 1) != 0) {
            commands_[lane].status = Status::DeviceError;
            commands_[lane].stage = Stage::Ended;
          }
        });
        continue;
      }
      IssuerPair& queue = queues_.pairs[pair];
      const uint32_t tail = queue.tail;
      warp_.each([&](uint32_t lane) {
        if ((mine >> lane & 1) == 0) {
          return;
        }
        Command& c = commands_[lane];
        const uint32_t rank = warp_.population(mine & ((1U << lane) - 1));
        queue.sq[(tail + rank) % kQueueEntries] =
            nvme::transfer_command(c.write, queue.pointer, static_cast<uint16_t>(lane), queue.nsid + (c.device - pair),
                                   c.lba >> (options_.block_shift - 9), options_.object_bytes >> options_.block_shift,
                                   data_of(queue, lane, c));
        c.stage = Stage::InFlight;
        c.deadline_ns = deadline;
      });
      warp_.single([&] {
        queue.tail = (tail + warp_.population(mine)) % kQueueEntries;
        nvme::ring_doorbell(queue.sq_doorbell, queue.tail);
      });
    }
  }

  TUTTI_HD nvme::DataDescriptor data_of(const IssuerPair& queue, uint32_t lane, const Command& c) const noexcept {
    const nvme::P2pRange& range = options_.bounce ? *queues_.slot_range : options_.ranges[c.range];
    const uint64_t address = options_.bounce ? slot_of(lane) : c.memory;
    return nvme::describe(queue, range, address, options_.object_bytes, lane);
  }

  // --- ending ---

  TUTTI_HD void end() noexcept {
    uint32_t ended = mask([](const Command& c) { return c.stage == Stage::Ended; });
    if (ended == 0) {
      return;
    }
    warp_.each([&](uint32_t lane) {
      const Command& c = commands_[lane];
      if ((ended >> lane & 1) != 0 && c.status != Status::Ok) {
        ring_.statuses[static_cast<uint64_t>(c.iocb) * kIoctxPerIocb + c.context] = static_cast<uint8_t>(c.status);
        gpu_compare_exchange(&ring_.first_error[c.iocb], 0U, static_cast<uint32_t>(c.status) << 16 | c.context);
      }
    });
    while (ended != 0) {
      const uint32_t leader = warp_.trailing_ones(~ended);  // lowest bit set
      const uint32_t iocb = warp_.from(leader, [&](uint32_t lane) { return uint32_t{commands_[lane].iocb}; });
      const uint32_t same = warp_.ballot(
          [&](uint32_t lane) { return (ended >> lane & 1) != 0 && uint32_t{commands_[lane].iocb} == iocb; });
      warp_.each([&](uint32_t lane) {
        if (lane == leader) {
          contexts_ended(commands_[lane], warp_.population(same));
        }
      });
      warp_.each([&](uint32_t lane) {
        if ((same >> lane & 1) != 0) {
          commands_[lane].stage = Stage::Free;
        }
      });
      ended &= ~same;
    }
  }

  TUTTI_HD void contexts_ended(const Command& c, uint32_t number) noexcept {
    if (gpu_fetch_add(&ring_.done[c.iocb], number) + number != c.contexts) {
      return;
    }
    const uint32_t error = ring_.first_error[c.iocb];
    ring_.first_error[c.iocb] = 0;
    ring_.done[c.iocb] = 0;
    const uint32_t position = gpu_fetch_add(ring_.completion_tail, 1);
    Cqe& entry = ring_.completions[position % ring_.depth];
    entry.iocb = c.iocb;
    entry.generation = ring_.iocbs[c.iocb].header.generation;
    entry.status = error >> 16;
    entry.contexts = c.contexts;
    store_release(&ring_.completion_ready[position % ring_.depth], position + 1);
  }

  static constexpr uint64_t kLookNs = 20'000;  // between looks at the states of the pairs

  Warp& warp_;
  const RingView ring_;
  const IssuerQueues queues_;
  const IssueOptions options_;
  BlockShared& shared_;
  const uint32_t first_job_;
  const uint32_t segments_;
  typename Warp::template PerLane<Command> commands_;
  typename Warp::template PerLane<uint32_t> found_;
  uint32_t cached_position_ = 0;
  uint32_t cached_cell_ = 0;
  uint64_t next_look_ns_ = 0;
  uint32_t broken_ = 0;  // pairs that take no more commands, a bit each; the same in all lanes
  bool able_ = true;
  bool last_ = false;
};

// Body of an issuing warp.
template <typename Warp>
TUTTI_HD void run_issuer(Warp& warp, const RingView& ring, const IssuerQueues& queues, const IssueOptions& options,
                         BlockShared& shared, uint32_t index_in_block) noexcept {
  Issuer<Warp> issuer(warp, ring, queues, options, shared, index_in_block);
  issuer.run();
  warp.single([&] { block_fetch_add(&shared.issuers, ~uint32_t{0}); });
}

}  // namespace tutti::gio
