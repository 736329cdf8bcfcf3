// The farthest positive (HP), the nearest negative (HN).
#pragma once

#include "extreme.h"

namespace tripletops {

template <class T>
struct HardRule : ExtremeRule<T> {
  explicit HardRule(Kind kind)
      : ExtremeRule<T>(kind, kind == Kind::positives ? Keep::farthest : Keep::nearest) {}
};

}  // namespace tripletops
