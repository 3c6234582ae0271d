-- The optim table: optimizers and schedules.
local adam = require "dtrain.optim.adam"
local define = require "dtrain.optim.define"
local schedule = require "dtrain.optim.schedule"
local util = require "dtrain.util"

local optim = {
  define = define.define,
  is_optimizer = define.is,
  is_schedule = schedule.is,
  --- optim.rates(schedule, n, base): the learning rates of steps 0 .. n - 1 as a list.
  rates = schedule.table,
  SGD = require "dtrain.optim.sgd",
  Adam = adam.Adam,
  AdamW = adam.AdamW,
  RMSprop = require "dtrain.optim.rmsprop",
  Adagrad = require "dtrain.optim.adagrad",
  Lion = require "dtrain.optim.lion",
  LAMB = require "dtrain.optim.lamb",
}

for _, name in ipairs { "constant", "step", "multistep", "exponential", "linear", "polynomial", "cosine", "warmup",
  "warmup_cosine", "warmup_linear", "warmup_constant", "one_cycle" } do
  optim[name] = schedule[name]
end

return util.strict(optim, "optim")
