// How runs of a GDS lane end other than by completing: deadlines, entries that never end, cancelling, closing; and
// random faults, under which no request is lost and none ends twice.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <vector>

#include "check.h"
#include "gds_bench.h"
#include "tutti/gds/cufile_abi.h"

using namespace tutti;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Bench;
using testing::fake;
using testing::kObject;
using testing::kObjects;

namespace {

void a_hanging_entry_ends_at_the_deadline() {
  fake.reset();
  fake.entry(2, kFakeHang, 0);
  Bench bench;
  CHECK(bench.submit(bench.requests(3)) == 3);
  CHECK(bench.results().size() == 2 && bench.lane->in_flight() == 1 && fake.calls("cuFileBatchIOCancel") == 0);
  GdsCompletion none;
  CHECK(bench.lane->poll({&none, 1}, milliseconds(3)) == 0);
  bench.now += seconds(1);
  auto told = bench.results();
  told.merge(bench.results());
  CHECK(told.size() == 1 && told.at(1001).status == Status::Timeout && told.at(1001).settled);
  CHECK(fake.calls("cuFileBatchIOCancel") == 1 && fake.calls("cuFileBatchIODestroy") == 1);
  CHECK(bench.lane->unsettled() == 0 && bench.lane->in_flight() == 0);
  CHECK(bench.submit(bench.requests(3)) == 3 && bench.results().size() == 3);
  CHECK(fake.calls("cuFileBatchIOSetUp") == 3);
}

void memory_of_a_stuck_entry_is_free_only_when_it_has_ended() {
  fake.reset();
  {
    fake.entry(1, kFakeStuck, 0);
    Bench bench(8, 1);
    CHECK(bench.submit(bench.requests(2)) == 2);
    CHECK(bench.results().at(1001).status == Status::Ok);
    bench.now += seconds(1);
    CHECK(bench.poll().empty() && bench.submit({bench.request(5)}) == 0);  // within its grace
    bench.now += seconds(1);
    auto told = bench.results();
    CHECK(told.size() == 1 && told.at(1000).status == Status::Timeout && !told.at(1000).settled);
    CHECK(bench.lane->unsettled() == 1 && bench.lane->in_flight() == 1 && fake.calls("cuFileBatchIODestroy") == 0);
    CHECK(bench.submit({bench.request(5)}) == 1);  // the only batch is out of service
    CHECK(bench.results().at(1005).status == Status::DeviceError && fake.calls("cuFileBatchIOSubmit") == 1);
    CHECK(bench.holds(0, '\0'));
    fake.release();
    told = bench.results();
    CHECK(bench.holds(0, 'A'));  // the device wrote after all
    CHECK(told.size() == 1 && told.at(1000).status == Status::Timeout && told.at(1000).settled);
    CHECK(bench.lane->unsettled() == 0 && fake.calls("cuFileBatchIODestroy") == 1);
    CHECK(bench.submit({bench.request(5)}) == 1 && bench.results().at(1005).status == Status::Ok);
    CHECK(bench.lane->close());
  }
  CHECK(fake.alive() == 0);
}

void completions_that_nobody_takes_leave_room_for_the_late_ones() {
  fake.reset();
  fake.entry(1, kFakeStuck, 0);
  fake.entry(2, kFakeStuck, 0);
  Bench bench(2, 1);
  CHECK(bench.submit(bench.requests(2)) == 2);
  GdsCompletion none;
  for (int step = 0; step < 3; ++step) {
    CHECK(bench.lane->poll({&none, 0}, milliseconds(0)) == 0);
    bench.now += seconds(2);
  }
  CHECK(bench.lane->unsettled() == 2 && bench.submit({bench.request(5)}) == 0);
  fake.release();
  const auto told = bench.poll();
  CHECK(told.size() == 4 && !told[0].settled && !told[1].settled && told[2].settled && told[3].settled);
  CHECK(bench.submit({bench.request(5)}) == 1 && bench.results().at(1005).status == Status::Ok);
}

void closing_cancels_and_keeps_what_is_still_in_use() {
  fake.reset();
  fake.entry(2, kFakeHang, 0);
  {
    Bench bench;
    CHECK(bench.submit(bench.requests(2)) == 2 && bench.lane->close() && fake.alive() == 0);
    const auto told = bench.results();
    CHECK(told.size() == 2 && told.at(1001).status == Status::Cancelled && told.at(1001).settled);
  }
  fake.reset();
  fake.entry(1, kFakeStuck, 0);
  {
    Bench bench;
    CHECK(bench.submit(bench.requests(2)) == 2 && !bench.lane->close() && !bench.lane->close());
    const auto told = bench.results();
    CHECK(told.size() == 2 && told.at(1000).status == Status::Cancelled && !told.at(1000).settled);
    CHECK(bench.lane->unsettled() == 1);
  }
  // Both batches are destroyed; two files, the buffer and the driver stay.
  CHECK(fake.calls("cuFileBatchIODestroy") == 2 && fake.alive() == 4 && fake.calls("cuFileDriverClose") == 0);
}

void cancelled_by_the_caller() {
  fake.reset();
  Bench bench;
  CHECK(bench.submit(bench.requests(3)) == 3);
  fake.fail("cuFileBatchIOCancel", 1, 5042);  // cancelling fails: the entries end as they do
  bench.lane->cancel();
  CHECK(bench.results().at(1002).status == Status::Ok);
  CHECK(bench.submit(bench.requests(3)) == 3);
  bench.lane->cancel();
  for (const auto& [tag, completion] : bench.results()) {
    CHECK(completion.status == Status::Cancelled && completion.settled);
  }
  CHECK(bench.lane->in_flight() == 0);
}

void random_faults_never_lose_a_request(uint64_t seed) {
  fake.reset();
  testing::Random random(seed);
  const std::vector<int> fates{0, 0, 0, kFakeShort, kFakeResult, kFakeStatus, kFakeHang, kFakeTwice, kFakePending};
  for (int nth = 1; nth <= 600; ++nth) {
    const int fate = fates[random.below(fates.size())];
    const std::map<int, int64_t> values{{kFakeShort, 100}, {kFakeResult, -EIO}, {kFakeStatus, cufile::kTimeout}};
    fake.entry(nth, fate, values.contains(fate) ? values.at(fate) : 0);
  }
  fake.limits(2, 128);
  {
    Bench bench(5, 3);
    std::map<uint64_t, int> settled;
    uint64_t next = 0;
    for (int round = 0; next < 500 || bench.lane->in_flight() != 0; ++round) {
      CHECK(round < 20000);
      std::vector<GdsRequest> wanted;
      for (uint64_t i = 0; i < 1 + random.below(7) && next + i < 500; ++i) {
        wanted.push_back(bench.request(static_cast<uint32_t>((next + i) % kObjects)));
        wanted.back().tag = next + i;
      }
      next += bench.submit(wanted);
      for (const GdsCompletion& completion : bench.poll()) {
        // Where the clock jumps over the grace before all of a batch's cancellations were told, they are told late.
        CHECK(completion.settled || completion.status == Status::Timeout);
        settled[completion.tag] += static_cast<int>(completion.settled);
        CHECK(settled[completion.tag] <= 1);
        CHECK(completion.status != Status::Ok || completion.result == int64_t{kObject});
      }
      bench.now += milliseconds(random.below(400));
    }
    if (settled.size() != 500) {
      std::fprintf(stderr, "seed %llu: %zu of 500 settled\n", static_cast<unsigned long long>(seed), settled.size());
    }
    CHECK(std::ranges::all_of(settled, [](const auto& item) { return item.second == 1; }));
    CHECK(settled.size() == 500 && bench.lane->close());
  }
  CHECK(fake.alive() == 0);
}

}  // namespace

int main() {
  fake.load();
  a_hanging_entry_ends_at_the_deadline();
  memory_of_a_stuck_entry_is_free_only_when_it_has_ended();
  completions_that_nobody_takes_leave_room_for_the_late_ones();
  closing_cancels_and_keeps_what_is_still_in_use();
  cancelled_by_the_caller();
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    random_faults_never_lose_a_request(seed);
  }
}
