#include "gradwire/exec/plan/wide_folds.h"

#include <gtest/gtest.h>

#include <string>

namespace gradwire::exec {
namespace exec_wide_folds_test {

// A letter for each addend: s(ingle), b(egins), m(iddle), e(nds); capital where it averages.
std::string folds_of(const ChunkRounds& rounds, bool averages = false) {
  std::string text;
  for (const WideFold& fold : wide_folds(rounds, averages)) {
    char letter = fold.begins ? (fold.ends ? 's' : 'b') : (fold.ends ? 'e' : 'm');
    EXPECT_EQ(fold.place == WideFold::kNone, letter == 's' && !fold.averages);
    if (fold.averages) letter = static_cast<char>(letter - 'a' + 'A');
    text += letter;
  }
  return text;
}

TEST(WideFolds, AddendsOfOneRoundAreOneSum) {
  EXPECT_EQ(folds_of({{0, 0, 0}, {1}, {}}), "bme");
  EXPECT_EQ(folds_of({{0, 0, 0}, {1}, {}}, true), "bmE");
}

TEST(WideFolds, SoAreThoseOfSeveralRoundsWithoutASendInBetween) {
  EXPECT_EQ(folds_of({{0, 2}, {3}, {}}), "be");
  EXPECT_EQ(folds_of({{1, 2}, {1}, {}}), "be");  // was read before the first arrived
}

TEST(WideFolds, AChunkThatIsSentIsRoundedBefore) {
  EXPECT_EQ(folds_of({{0, 1, 2}, {1, 2}, {}}), "sss");
  EXPECT_EQ(folds_of({{0, 0, 2}, {2}, {}}), "bes");
}

TEST(WideFolds, AChunkThatIsReplacedIsAnotherSum) {
  EXPECT_EQ(folds_of({{0, 2}, {}, {1}}), "ss");
  EXPECT_EQ(folds_of({{0, 1}, {}, {1}}), "ss");
}

TEST(WideFolds, ASingleAddendIsAveragedInFloat32) {
  EXPECT_EQ(folds_of({{0}, {1}, {}}), "s");
  EXPECT_EQ(folds_of({{0}, {1}, {}}, true), "S");
  EXPECT_EQ(folds_of({{}, {0}, {}}, true), "");
}

TEST(WidePlaces, AreTakenAgain) {
  WidePlaces places;
  EXPECT_EQ(places.take(), 0U);
  EXPECT_EQ(places.take(), 1U);
  places.give_back(0);
  EXPECT_EQ(places.take(), 0U);
  EXPECT_EQ(places.most(), 2U);
}

}  // namespace exec_wide_folds_test
}  // namespace gradwire::exec
