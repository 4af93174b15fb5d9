// The row cache of every backend, against a plain model of it, over steps whose selections repeat
// themselves; and attention to rows that it placed, which must not know the difference.
#include "lib/backend/row_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/paged_cases.h"
#include "tests/support/random.h"

namespace sluice {
namespace {

using testing::AttentionCase;
using testing::BatchQueries;
using testing::download;
using testing::NamedBackend;
using testing::newest_case;
using testing::PagedSequences;
using testing::Places;
using testing::Random;
using testing::upload;

// What the cache of one KV head has to hold.
class ModelHead {
 public:
  explicit ModelHead(const RowCacheView& cache)
      : cache_(cache), ways_(static_cast<std::size_t>(cache.ways())) {}

  struct Way {
    RowCacheView::Tag tag = RowCacheView::kNothing;
    std::int32_t heat = RowCacheView::kCold;
  };

  int find(RowCacheView::Tag tag) const {
    for (std::size_t way = 0; way < ways_.size(); ++way) {
      if (ways_[way].tag == tag) return static_cast<int>(way);
    }
    return -1;
  }
  void heat(int way, std::int32_t fresh) {
    std::int32_t& heat = ways_[static_cast<std::size_t>(way)].heat;
    heat = RowCacheView::heated(heat, fresh);
  }
  // The way that a row gets which is nowhere; -1 for none.
  int take(RowCacheView::Tag tag, std::int32_t fresh) {
    const std::int64_t first = cache_.set_of(tag) * RowCacheView::kWays;
    std::int64_t coldest = first;
    for (std::int64_t way = first; way < first + RowCacheView::kWays; ++way) {
      if (at(way).heat < at(coldest).heat) coldest = way;
    }
    if (at(coldest).heat >= fresh) return -1;
    if (at(coldest).tag != RowCacheView::kNothing) ++evicted;
    at(coldest) = {tag, fresh};
    return static_cast<int>(coldest);
  }
  std::vector<Way>& ways() { return ways_; }

  int evicted = 0;  // rows that made room for others

 private:
  Way& at(std::int64_t way) { return ways_[static_cast<std::size_t>(way)]; }

  RowCacheView cache_;
  std::vector<Way> ways_;
};

class CacheRun {
 public:
  CacheRun(testing::Device& backend, Random& random, const std::vector<AttentionCase>& cases,
           std::int64_t sets, std::int64_t most, Places places)
      : backend_(backend),
        random_(random),
        shape_(cases.front().shape),
        scale_(cases.front().scale),
        most_(most),
        sequences_(backend, random, cases, places),
        queries_(backend, cases) {
    const Tier tier = backend.info().compute_tier;
    const auto ways = static_cast<std::size_t>(shape_.kv_heads * sets * RowCacheView::kWays);
    const std::size_t tokens = sequences_.tokens().size();
    cached_ = backend.allocate(tier, ways * shape_.row_bytes());
    tags_ = backend.allocate(tier, ways * sizeof(RowCacheView::Tag));
    heat_ = backend.allocate(tier, ways * sizeof(std::int32_t));
    clock_ = backend.allocate(tier, sizeof(std::int32_t));
    places_ = backend.allocate(tier, tokens * heads() * capacity() * sizeof(PlacedRow));
    heads_ = backend.allocate(Tier::host, tokens * heads() * sizeof(HeadSelection));
    resident_ = backend.allocate(Tier::host, tokens * heads() * sizeof(std::int32_t));
    evicted_ = backend.allocate(Tier::host, tokens * heads() * sizeof(std::int32_t));
    arena_ = backend.allocate(tier, heads() * kArenaRows * shape_.row_bytes());
    view_.rows = cached_.data();
    view_.tags = reinterpret_cast<RowCacheView::Tag*>(tags_.data());
    view_.heat = reinterpret_cast<std::int32_t*>(heat_.data());
    view_.sets = sets;
    view_.host_rows = sequences_.rows().host_stride / static_cast<std::int64_t>(shape_.row_bytes());
    view_.clock = reinterpret_cast<const std::int32_t*>(clock_.data());
    ForgetRowsParams p;
    p.shape = shape_;
    p.cache = view_;
    p.all = true;
    backend.queue->run(p);
    for (std::size_t head = 0; head < heads(); ++head) model_.emplace_back(view_);
  }

  void begin_step(std::int32_t clock) {
    now_ = clock;
    const CopyOp op = {clock_.data(), reinterpret_cast<const std::byte*>(&now_), sizeof(now_)};
    backend_.queue->copy({&op, 1});
    backend_.synchronize();
  }

  // One layer of a step: rows of another selection are found and attended to.
  void attend(int layer) {
    choose();
    const std::vector<PlacedRow> expected = expected_places(layer);
    const std::vector<testing::Partial> before = attend_to(AttendSelectedParams());
    std::vector<std::int32_t> resident(chosen_.size());
    FindRowsParams find;
    find.shape = shape_;
    find.batch = sequences_.batch();
    find.selected = selection();
    find.rows = sequences_.rows();
    find.layer = layer;
    find.cache = view_;
    find.places = reinterpret_cast<PlacedRow*>(places_.data());
    find.evicted = reinterpret_cast<std::int32_t*>(evicted_.data());
    backend_.queue->run(find);
    const auto places = download<PlacedRow>(backend_, places_);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (i % capacity() >= chosen_[i / capacity()].size()) continue;
      ASSERT_EQ(places[i].place, expected[i].place) << "row " << i;
      ASSERT_EQ(places[i].number, expected[i].number) << "row " << i;
      resident[i / capacity()] += places[i].is_cached() || places[i].is_on_device() ? 1 : 0;
      hits_ += places[i].is_cached() ? 1 : 0;
      kept_ += places[i].is_kept() ? 1 : 0;
    }
    AttendSelectedParams placed;
    placed.places = find.places;
    placed.cache = view_;
    const std::vector<testing::Partial> after = attend_to(placed);
    for (std::size_t token = 0; token < before.size(); ++token) {
      ASSERT_EQ(before[token].out, after[token].out) << "token " << token;
      ASSERT_EQ(before[token].lse, after[token].lse) << "token " << token;
    }
    for (std::size_t i = 0; i < resident.size(); ++i) {
      ASSERT_EQ(seen_resident()[i], resident[i]) << "token and head " << i;
      ASSERT_EQ(find.evicted[i], expected_evicted_[i]) << "token and head " << i;
    }
    expect_contents();
  }

  // Rows [first, first + count) in host memory count as rewritten for the cache.
  void forget(std::int64_t first, std::int64_t count) {
    backend_.queue->run(ForgetRowsParams{shape_, view_, false, first, count});
    for (ModelHead& head : model_) {
      for (ModelHead::Way& way : head.ways()) {
        const auto host = static_cast<std::int64_t>(view_.host_of(way.tag));
        const bool empty = way.tag == RowCacheView::kNothing;
        if (!empty && host >= first && host < first + count) way = ModelHead::Way();
      }
    }
    expect_contents();
  }

  std::int64_t hits() const { return hits_; }
  std::int64_t kept() const { return kept_; }

 private:
  static constexpr std::int64_t kArenaRows = 96;

  std::size_t heads() const { return static_cast<std::size_t>(shape_.kv_heads); }
  std::size_t capacity() const { return static_cast<std::size_t>(most_ + 3); }
  HeadSelection& selected(std::size_t index) const {
    return reinterpret_cast<HeadSelection*>(heads_.data())[index];
  }
  std::int32_t* seen_resident() const { return reinterpret_cast<std::int32_t*>(resident_.data()); }
  SelectionView selection() const {
    return {reinterpret_cast<std::int32_t*>(positions_.data()),
            static_cast<std::int64_t>(capacity()), reinterpret_cast<HeadSelection*>(heads_.data())};
  }

  // Early positions more often than late ones.
  void choose() {
    chosen_.clear();
    std::vector<std::int32_t> positions;
    for (const BatchToken& token : sequences_.tokens()) {
      for (std::size_t head = 0; head < heads(); ++head) {
        const std::int64_t most = std::min(token.page_first(), random_.integer(0, most_));
        std::set<std::int32_t> own;
        while (static_cast<std::int64_t>(own.size()) < most) {
          const double u = static_cast<double>(random_.integer(0, 999)) / 1000.0;
          const auto skewed =
              static_cast<std::int64_t>(u * u * u * static_cast<double>(token.page_first()));
          const std::int64_t plain = random_.integer(0, token.page_first() - 1);
          own.insert(static_cast<std::int32_t>(random_.integer(0, 3) > 0 ? skewed : plain));
        }
        positions.insert(positions.end(), own.begin(), own.end());
        selected(chosen_.size()).count = static_cast<std::int32_t>(own.size());
        chosen_.emplace_back(own.begin(), own.end());
        positions.resize(chosen_.size() * capacity(), -1);
      }
    }
    positions_ = upload(backend_, positions);
  }

  std::vector<PlacedRow> expected_places(int layer) {
    std::vector<PlacedRow> places(chosen_.size() * capacity());
    expected_evicted_.assign(chosen_.size(), 0);
    const std::int32_t fresh = RowCacheView::heat_of_new(now_);
    const auto for_selected = [&](const auto& body) {
      for (std::size_t i = 0; i < chosen_.size(); ++i) {
        for (std::size_t n = 0; n < chosen_[i].size(); ++n) {
          body(model_[i % heads()], sequences_.tokens()[i / heads()].sequence, chosen_[i][n],
               places[i * capacity() + n]);
        }
      }
    };
    for_selected([&](ModelHead& head, std::int32_t sequence, std::int32_t at, PlacedRow& place) {
      const PageSlots& page = sequences_.page_of(sequence, at);
      const auto number = [&](std::int32_t slot) {
        return slot * static_cast<std::int32_t>(kPageTokens) +
               at % static_cast<std::int32_t>(kPageTokens);
      };
      if (page.device != PageSlots::kNone) {
        place = {number(page.device), PlacedRow::kDevice};
        return;
      }
      place = {number(page.host), PlacedRow::kHost};
      const int way = head.find(view_.tag(layer, place.number));
      if (way < 0) return;
      head.heat(way, fresh);
      place = {way, PlacedRow::kCached};
    });
    for_selected([&](ModelHead& head, std::int32_t, std::int32_t, PlacedRow& place) {
      if (place.place != PlacedRow::kHost) return;
      const RowCacheView::Tag tag = view_.tag(layer, place.number);
      if (const int way = head.find(tag); way >= 0) return head.heat(way, fresh);
      const int before = head.evicted;
      place.place = head.take(tag, fresh);
      const auto index = static_cast<std::size_t>(&place - places.data()) / capacity();
      expected_evicted_[index] += head.evicted - before;
    });
    return places;
  }

  std::vector<testing::Partial> attend_to(AttendSelectedParams p) {
    queries_.put(p);
    p.batch = sequences_.batch();
    p.selected = selection();
    p.resident = seen_resident();
    p.rows = sequences_.rows();
    p.arena = arena_.data();
    p.arena_rows = kArenaRows;
    p.scale = scale_;
    backend_.queue->run(p);
    return queries_.results_by_token();
  }

  // Tags, heat, and the rows themselves.
  void expect_contents() {
    const auto tags = download<RowCacheView::Tag>(backend_, tags_);
    const auto heat = download<std::int32_t>(backend_, heat_);
    const auto cached = download<std::byte>(backend_, cached_);
    const std::size_t bytes = shape_.row_bytes();
    const PagedRows rows = sequences_.rows();
    std::size_t at = 0;
    for (std::size_t head = 0; head < heads(); ++head) {
      for (const ModelHead::Way& way : model_[head].ways()) {
        ASSERT_EQ(tags[at], way.tag) << "way " << at;
        ASSERT_EQ(heat[at], way.heat) << "way " << at;
        if (way.tag != RowCacheView::kNothing) {
          const std::byte* const host = rows.host +
                                        static_cast<std::int64_t>(head) * rows.host_stride +
                                        static_cast<std::size_t>(view_.host_of(way.tag)) * bytes;
          ASSERT_EQ(std::memcmp(&cached[at * bytes], host, bytes), 0) << "way " << at;
        }
        ++at;
      }
    }
  }

  testing::Device& backend_;
  Random& random_;
  KvShape shape_;
  float scale_;
  std::int64_t most_;
  PagedSequences sequences_;
  BatchQueries queries_;
  RowCacheView view_;
  std::vector<ModelHead> model_;
  std::vector<int> expected_evicted_;              // [tokens * kv_heads]
  std::vector<std::vector<std::int32_t>> chosen_;  // likewise
  std::int32_t now_ = 0;
  std::int64_t hits_ = 0;
  std::int64_t kept_ = 0;
  Buffer cached_, tags_, heat_, clock_, places_, positions_, heads_, resident_, evicted_, arena_;
};

using Shape = std::tuple<RowFormat, int, int>;  // of rows, head_dim, group
using Param = std::tuple<NamedBackend, Shape>;

class RowCacheParity : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    backend_ = testing::make_or_skip(std::get<NamedBackend>(GetParam()), shape(2));
  }
  KvShape shape(int kv_heads) const {
    const auto [format, head_dim, group] = std::get<Shape>(GetParam());
    return {1, kv_heads * group, kv_heads, head_dim, format};
  }
  // Steps of `layers` layers.
  void run(CacheRun& cache, int steps, int layers) {
    for (int step = 1; step <= steps; ++step) {
      cache.begin_step(step);
      for (int layer = 0; layer < layers; ++layer) {
        SCOPED_TRACE(::testing::Message() << "step " << step << " layer " << layer);
        cache.attend(layer);
        if (HasFatalFailure()) return;
      }
    }
  }

  const std::uint64_t seed_ = testing::seed(41);
  Random random_{seed_};
  std::unique_ptr<testing::Device> backend_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

// From a cache that is always too small to one that holds nearly everything.
TEST_P(RowCacheParity, OneToken) {
  for (const std::int64_t sets : {1, 3, 40}) {
    SCOPED_TRACE(::testing::Message() << sets << " sets");
    CacheRun cache(*backend_, random_, {newest_case(random_, shape(2), 900)}, sets, 200,
                   Places::host);
    run(cache, 6, 2);
    if (HasFatalFailure()) return;
    EXPECT_GT(cache.kept(), 0);
    EXPECT_GT(cache.hits(), 0);
  }
}

// Tokens of one sequence select the same rows; pages are in either tier.
TEST_P(RowCacheParity, Batches) {
  const KvShape of = shape(3);
  const std::vector<AttentionCase> cases = {
      newest_case(random_, of, 700), newest_case(random_, of, 386, 4), newest_case(random_, of, 1),
      newest_case(random_, of, random_.integer(2, 1500))};
  for (const std::int64_t sets : {2, 30}) {
    SCOPED_TRACE(::testing::Message() << sets << " sets");
    CacheRun cache(*backend_, random_, cases, sets, 150, Places::either);
    run(cache, 5, 3);
    if (HasFatalFailure()) return;
    EXPECT_GT(cache.hits(), 0);
  }
}

// More rows than a block of a GPU looks up at a time.
TEST_P(RowCacheParity, ManyRows) {
  CacheRun cache(*backend_, random_, {newest_case(random_, shape(1), 6000)}, 90, 4500,
                 Places::host);
  run(cache, 3, 1);
}

// Every worker of a GPU has parts of several heads, and more tiles than it holds at a time.
TEST_P(RowCacheParity, ManyTiles) {
  if (backend_->info().name == "reference") GTEST_SKIP() << "it finds rows as the CPU does";
  std::vector<AttentionCase> cases;
  for (int i = 0; i < 8; ++i) cases.push_back(newest_case(random_, shape(8), 2000 + 50 * i));
  CacheRun cache(*backend_, random_, cases, 200, 1400, Places::host);
  run(cache, 2, 1);
  if (HasFatalFailure()) return;
  EXPECT_GT(cache.hits(), 0);
}

TEST_P(RowCacheParity, ForgetsRowsThatChanged) {
  CacheRun cache(*backend_, random_, {newest_case(random_, shape(2), 900)}, 20, 200, Places::host);
  for (int step = 1; step <= 4; ++step) {
    cache.begin_step(step);
    cache.attend(0);
    if (HasFatalFailure()) return;
    cache.forget(random_.integer(0, 900), random_.integer(1, 300));
    if (HasFatalFailure()) return;
  }
}

// The logarithm of a count that fades by 5 % a step and grows by one.
TEST(RowHeat, FollowsTheFadingCount) {
  Random random(3);
  std::int32_t heat = RowCacheView::heat_of_new(0);
  double count = 1.0;
  for (int clock = 1; clock < 2000; ++clock) {
    count *= std::exp2(-static_cast<double>(RowCacheView::kFade) / RowCacheView::kOctave);
    const std::int32_t fresh = RowCacheView::heat_of_new(clock);
    const double seen = static_cast<double>(heat - fresh) / RowCacheView::kOctave;
    ASSERT_NEAR(seen, std::log2(count), 0.7) << "step " << clock;
    if (random.integer(0, 9) >= (clock % 400 < 200 ? 2 : 9)) continue;
    count += 1.0;
    heat = RowCacheView::heated(heat, fresh);
    ASSERT_GE(heat, fresh) << "a row that was selected is no colder than a new one";
  }
}

std::string name_of(const ::testing::TestParamInfo<Param>& info) {
  const auto [format, head_dim, group] = std::get<Shape>(info.param);
  return std::get<NamedBackend>(info.param).name + "_" + to_string(format) + "_d" +
         std::to_string(head_dim) + "_g" + std::to_string(group);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, RowCacheParity,
    ::testing::Combine(::testing::ValuesIn(testing::backends_by_kind()),
                       ::testing::Values(Shape{DType::bf16, 128, 4}, Shape{DType::f16, 64, 1},
                                         Shape{DType::bf16, 80, 8}, Shape{DType::bf16, 96, 16},
                                         Shape{DType::bf16, 256, 4}, Shape{RowCode::int8, 128, 4},
                                         Shape{RowCode::k8v4, 128, 4},
                                         Shape{RowCode::k8v4, 80, 2})),
    name_of);

}  // namespace
}  // namespace sluice
