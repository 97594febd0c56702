#include "unit.h"
TEST(vulkan, Opens) { auto v = vk_open("llvmpipe"); EXPECT_NE(v->name, ""); (void)vk_ops; }
