/* Includes the file named by K_TEMPLATE once for float and once for double. In there T is the type, F(name) the name
 * with its suffix, K_LOAD / K_STORE the row conversions to and from T. */
#define T float
#define F(name) name##_f32
#define K_LOAD K(load_f32)
#define K_STORE K(store_f32)
#include K_TEMPLATE
#undef T
#undef F
#undef K_LOAD
#undef K_STORE
#define T double
#define F(name) name##_f64
#define K_LOAD K(load_f64)
#define K_STORE K(store_f64)
#include K_TEMPLATE
#undef T
#undef F
#undef K_LOAD
#undef K_STORE
