// unit.h: what every unit test includes first. The engine's own source comes in with it, so that its static functions
// can be tested.
#ifndef UNIT_H
#define UNIT_H

#include "../engine.cpp"

#include <gtest/gtest.h>

#include "util.h"

#endif
