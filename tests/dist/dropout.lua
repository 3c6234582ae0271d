-- A job with dropout, clipping, ignored labels and a parameter that gets no gradient: what ranks must agree on.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local Net = nn.module "Net"
function Net:init()
  self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 4)
  self.drop = nn.Dropout(0.3)
  self.unused = nn.Linear(3, 3)
end
function Net:forward(x) return self.down(self.drop(dt.relu(self.up(x)))) end

local n = 60
local labels = {}
for i = 1, n do labels[i] = i % 5 == 0 and -100 or i * i % 4 end -- -100: ignored by the loss

return dt.job {
  model = Net(),
  loss = nn.CrossEntropy(),
  data = data.tensors { inputs = dt.randn({ n, 6 }, 3), targets = dt.tensor(labels, "i64") },
  batch = 12,
  optimizer = optim.SGD { lr = 0.1, momentum = 0.9 },
  clip = 0.5,
  steps = 10,
}
