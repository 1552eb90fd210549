#include "forebay/host_backend.h"
