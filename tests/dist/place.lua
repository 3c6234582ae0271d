-- One small job for each operation and each way in which its inputs can lie on an axis of two or three ranks, or on two
-- axes of two: forward, and the gradient of every input. tests/lua/place_spec.lua compares with one process, where nothing
-- is divided. Leaves DIR/NAME.safetensors for each: "case" alone, "case;S(0),R" divided. --most: so many ways for each
-- operation, spread over all.
-- The axes are a strategy of this script's own.
local dt = require "dtrain"
local compare = require "dtrain.compare"
local cases = require "tests.dist.place_cases"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { dir = "", only = "", most = 1000000 }

local axes = { name = "cut", options = { { "parts", "count", 1 } } }
function axes.axes(p)
  if p.parts ~= 4 then return { { name = "cut", size = p.parts } } end
  return { { name = "cut", size = 2 }, { name = "other", size = 2 } }
end

local Case = nn.module "Case"
function Case:init(c, how, weights)
  self.case, self.how = c, how
  for i, shape in ipairs(c.shapes) do
    local p = nn.parameter(shape, nn.init.normal(0, 1))
    if how and how.params and how[i] ~= "R" then p.place = cases.place(how[i]) end
    self["p" .. i] = p
  end
  self.out = {}
  for i, shape in ipairs(weights) do self.out[i] = nn.parameter(shape, nn.init.normal(0, 1)) end
  for i, p in ipairs(self.out) do self["w" .. i] = p end
end
function Case:forward(x)
  local c, list = self.case, {}
  for i = 1, #c.shapes do
    local p = self["p" .. i]
    list[i] = self.how and not self.how.params and p:place(cases.place(self.how[i])) or p
  end
  if self.how and not self.how.params and c.ids then x = x:place(cases.place(self.how[#c.shapes + 1])) end
  local out, total = table.pack(c.f(list, x)), nil
  for i = 1, out.n do -- each output by weights of its own: the weights' gradient is the output
    local part = (out[i]:to "f32" * self["w" .. i]):sum()
    total = total and total + part or part
  end
  return total
end

local ids = data.tensors { inputs = cases.ids, targets = dt.zeros { 6, 1 } }

local function run(c, how, parts, name)
  local concrete = {}
  for i, shape in ipairs(c.shapes) do concrete[i] = dt.randn(shape, i) end
  local weights = {}
  if not c.out then
    for i, y in ipairs { c.f(concrete, cases.ids) } do weights[i] = y:shape() end
  else
    weights = c.out
  end
  local out
  local ok, message = pcall(function()
    local engine = dt.engine(dt.job { model = Case(c, how, weights), loss = function(y) return y end, data = ids, batch = 6,
      optimizer = optim.SGD { lr = 0.1 }, steps = 1,
      parallel = parts > 1 and { strategies = { axes }, parts = parts } or {} })
    out = compare.record(engine, 1)
    engine.exec:close()
  end)
  if dt.rank() ~= 0 then return end
  local path = ("%s/%s"):format(args.dir, name)
  if ok then
    dt.save(path .. ".safetensors", out)
  else
    local file <close> = assert(io.open(path .. ".error", "w"))
    file:write(message)
  end
end

local parts = dt.size()
for _, c in ipairs(cases.list) do
  if args.only == "" or c.name:find(args.only, 1, true) then
    if parts == 1 then
      run(c, nil, 1, c.name)
    else
      local ways = cases.ways(c, parts)
      local n = math.min(args.most, #ways)
      for k = 1, n do
        local how = ways[(k * 2 - 1) * #ways // (2 * n) + 1]
        run(c, how, parts, cases.title(c, how))
      end
    end
  end
end
