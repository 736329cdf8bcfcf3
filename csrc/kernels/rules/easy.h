// The nearest positive (EP), the farthest negative (EN).
#pragma once

#include "extreme.h"

namespace tripletops {

template <class T>
struct EasyRule : ExtremeRule<T> {
  explicit EasyRule(Kind kind)
      : ExtremeRule<T>(kind, kind == Kind::positives ? Keep::nearest : Keep::farthest) {}
};

}  // namespace tripletops
