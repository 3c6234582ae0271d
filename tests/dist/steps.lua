-- Trains another script's job with sizes of our choice, without its evaluations, and writes what came of it: the loss of each
-- step and everything the run holds (parameters, optimizer states, buffers).
--   dtrain tests/dist/steps.lua --script examples/linear.lua --global 7 --micro 2 --samples 23 --save out.safetensors --steps 5
-- What the other script declares with dt.args may follow.
local dt = require "dtrain"
local core = require "dtrain.core"
local engines = require "dtrain.engine"
local util = require "dtrain.util"

local args = dt.args { script = "examples/linear.lua", global = 8, micro = 0, samples = 0, save = "", optimizer = "",
  precision_of_job = "", zero = 0, resident = 0, bucket = 0.0, clip = 0.0, plans = "" }

local losses, last = {}, nil
local function save()
  local out = {}
  for _, name in ipairs(last.exec:names()) do out[name] = last.exec:get(name) end
  out["the losses"] = core.tensor(losses, "f64")
  if args.save ~= "" and dt.rank() == 0 then dt.save(args.save, out) end
end

local new_job, new_engine = dt.job, engines.new
dt.job = function(given)
  local o, set = util.copy(given), given.data
  if not set.core then set = set.train else set = set:part "train" or set end
  if args.samples > 0 then set = set:subset(0, args.samples) end
  o.data, o.batch = set, { global = args.global, micro = args.micro > 0 and args.micro or nil }
  o.eval, o.epochs, o.steps, o.after = nil, nil, 5, save
  if args.optimizer == "sgd" then o.optimizer = dt.optim.SGD { lr = 0.1, momentum = 0.9 } end
  if args.precision_of_job ~= "" then o.precision = args.precision_of_job end
  if args.clip > 0 then o.clip = args.clip end
  if args.zero > 0 or args.bucket > 0 then
    local bucket = args.bucket > 0 and args.bucket or nil
    o.parallel = { zero = args.zero, resident = args.zero == 3 and args.resident or nil,
      gradient = { bucket_mb = bucket, first_bucket_mb = bucket } }
  end
  return new_job(o)
end
engines.new = function(job)
  last = new_engine(job)
  local step = last.step
  last.step = function(self, batch)
    local m = step(self, batch)
    losses[#losses + 1] = m.loss
    return m
  end
  return last
end
dt.engine = engines.new

local job = dofile(args.script)
if job == nil then save() end -- a loop of its own has ended
return job
